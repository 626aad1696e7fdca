"""A sidecar that leads a stock server from outside."""
