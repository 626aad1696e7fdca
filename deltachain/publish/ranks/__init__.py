"""Coordination of a trainer's ranks: rendezvous, collectives, ownership of shards."""
