"""The store of S3 buckets."""
