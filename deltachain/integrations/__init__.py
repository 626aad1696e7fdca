"""Adapters to frameworks with names or steps of their own, imported on use."""
