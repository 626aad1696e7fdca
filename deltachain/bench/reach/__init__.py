"""Reach of a chain, simulated: requests, dollars and delays of a thousand followers."""
