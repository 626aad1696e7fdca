"""Checks and benchmarks for a CUDA card; they need torch, numpy and nothing else."""
