"""Measurements: realistic weights, what others' layouts cost on them, and what nothing can beat.

The chains here are synthetic and their statistics are tested against published measurements, so
that sizes and speeds measured on them say something about real training runs. Nothing in the
rest of the package imports this one.
"""
