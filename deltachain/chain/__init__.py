"""The chain in a store: manifests, edges, commits, plans, fetches."""
