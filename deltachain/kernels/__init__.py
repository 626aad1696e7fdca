"""The arithmetic of finding, taking apart, hashing and writing changes.

``reference`` defines it in plain numpy; ``host`` is the fast form on this machine's cores and
``device`` the form in torch operations, for weights that live on an accelerator. One contract test
holds them all to the reference, bit for bit.
"""
