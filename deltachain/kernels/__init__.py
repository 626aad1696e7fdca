"""Kernels: arithmetic to find, split, hash and write changes.

``reference`` defines the results in plain numpy; ``host`` is the fast implementation on the CPU and
``device`` the one in torch operations, for weights on an accelerator. ``staging`` works on batches
of many tensors there: ``batched`` in torch operations, ``fused`` in Triton programs. Contract tests
compare all of them with the reference, bit for bit.
"""
