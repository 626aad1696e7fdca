"""Adapters to trainers and engines with doors of their own; each imports its framework when used."""
