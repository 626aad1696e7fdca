"""Adapters to frameworks' own interfaces of weight sync, one module each, imported by name."""
