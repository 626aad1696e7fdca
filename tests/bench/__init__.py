"""Benchmarks on realistic weights, with other projects' formats and entropy limits to compare.

The chains are synthetic; tests compare their statistics with published measurements, so that sizes
and speeds are representative of real training runs.
"""
