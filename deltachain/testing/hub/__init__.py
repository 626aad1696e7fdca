"""A Hugging Face Hub with buckets and Xet storage on this machine, for tests without a network.

The stock ``huggingface_hub`` and ``hf_xet`` work against it; ``deltachain.testing.hub.server`` runs
it. Built from what these clients send and expect. What the real Hub does beyond that is unknown to
it: regions, redirects to a CDN, the live feed, global deduplication, garbage collection.
"""
