"""Adapters to frameworks with names or steps of their own, each imported when it is used."""
