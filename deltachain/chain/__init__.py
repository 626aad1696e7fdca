"""The chain in a store: manifests, edges, commits, plans and the fetch of a plan."""
