"""Documents of FORMAT.md: structure, keys and digests."""
