"""Local emulation of the Hugging Face Hub with buckets and Xet storage, for offline tests.

The stock ``huggingface_hub`` and ``hf_xet`` clients work against it; start it with
``tests.support.hub.server``. Not emulated: regions, CDN redirects, global
deduplication, garbage collection.
"""
