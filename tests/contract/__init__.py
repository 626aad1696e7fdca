"""Contracts that several implementations are held to."""
