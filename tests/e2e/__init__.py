"""Whole runs, as a person would make them."""
