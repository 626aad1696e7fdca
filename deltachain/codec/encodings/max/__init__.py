"""The encoding ``max``: ranks of changed elements in classes of the bits before a change.

:mod:`.encoding` writes and reads it, :mod:`.table` chooses the classes, :mod:`.tiles` says what
tiles are, and the others have kernels in numba.
"""
