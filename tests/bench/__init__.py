"""Benchmarks on realistic weights, with other projects' formats and entropy limits to compare."""
