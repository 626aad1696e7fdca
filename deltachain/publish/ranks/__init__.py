"""What the ranks of a trainer do together: rendezvous, collectives, ownership of shards."""
