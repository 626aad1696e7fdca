"""The store of Hugging Face buckets."""
