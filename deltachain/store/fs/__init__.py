"""Stores through fsspec."""
