"""Integrations with trainers of other libraries."""
