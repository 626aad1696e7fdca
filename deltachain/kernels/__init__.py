"""Kernels: arithmetic to find, split, hash and write changes.

``reference`` defines the results in plain numpy; ``host`` is the fast implementation on the CPU and
``device`` the one in torch operations, for weights on an accelerator. Many tensors at a time are
compared with a snapshot by ``crossing`` (``compact`` in torch operations, ``fused_diff`` in
Triton), and staged by ``staging`` (``batched`` in torch operations, ``fused`` in Triton). Contract
tests compare all of them with the reference, bit for bit.
"""
