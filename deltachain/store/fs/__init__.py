"""Stores of fsspec."""
