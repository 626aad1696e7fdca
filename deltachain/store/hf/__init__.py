"""Store in Hugging Face buckets."""
