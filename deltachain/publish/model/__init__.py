"""The model that is published: its weights, shards and layout."""
