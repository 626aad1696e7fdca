"""Store in a folder of a file system."""
