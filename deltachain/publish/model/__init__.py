"""The published model: its weights, shards and layout."""
