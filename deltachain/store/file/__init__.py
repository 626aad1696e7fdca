"""The store of folders of a file system."""
