"""Store in S3 buckets."""
