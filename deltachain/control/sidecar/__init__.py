"""Sidecar that updates a stock server from outside."""
