"""The log of a chain: its manifests and their order, plans, and what fetches them."""
