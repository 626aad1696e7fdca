"""The encoding ``max``: ranks of changed elements in classes of the bits before a change.

:mod:`.encoding` writes and reads it, :mod:`.table` chooses the classes, :mod:`.tiles` has the
reference kernels, and the others those in numba.
"""
