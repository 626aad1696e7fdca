"""Kernels: arithmetic to find, split, hash and write changes.

``reference`` defines the results in plain numpy; ``host`` is the fast implementation on the CPU and
``device`` the one in torch operations, for weights on an accelerator. ``crossing`` compares weights
on an accelerator with a snapshot, many tensors at a time, by ``compact`` in torch operations or
``fused_diff`` in Triton. A contract test compares all of them with the reference, bit for bit.
"""
