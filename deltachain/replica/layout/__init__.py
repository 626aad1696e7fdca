"""Discovery of the layout of an engine: where each checkpoint tensor lives, and proof of it."""
