"""Adapters: the transports of weights that training frameworks let others write."""
