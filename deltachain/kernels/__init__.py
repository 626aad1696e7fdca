"""Kernels: arithmetic to find, split, hash and write changes.

``reference`` defines the results in plain numpy; ``host`` is the fast implementation on the CPU and
``device`` the one in torch operations, for weights on an accelerator. In Triton, ``device_diff``
compares many tensors at a time with a snapshot, and ``staging`` decodes and stages their changes.
Contract tests compare all of them with the reference, bit for bit.
"""
