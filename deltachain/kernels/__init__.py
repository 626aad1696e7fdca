"""Arithmetic to find, split, hash and write changes.

``host`` has those of the CPU, in numba, and ``torch_kernels`` those in torch operations, for
weights on an accelerator. In Triton, ``device_diff`` compares many tensors at a time with a
snapshot, and ``staging`` decodes and stages their changes. Contract tests compare all of them with
a reference in plain numpy, bit for bit.
"""
