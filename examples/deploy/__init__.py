"""Recipes of deployments, and what runs in their containers."""
