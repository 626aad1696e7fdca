"""Proves a chain as it lies in its store: every document, every object, every state.

Nothing that the chain says of itself is believed. Its weights are rebuilt once from nothing and
carried from version to version; each edge must lead from the state of its base to the state of its
version, whatever else there is: the deltas that are applied, anchors, skips.
"""

from deltachain.verify.documents import edge_records, newest
from deltachain.verify.walk import EdgeProof, VersionProof, verify
from deltachain.verify.weights import matches

__all__ = [
    "EdgeProof",
    "VersionProof",
    "edge_records",
    "matches",
    "newest",
    "verify",
]
