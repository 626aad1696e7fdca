"""The documents of FORMAT.md: their structure, keys and digests."""
