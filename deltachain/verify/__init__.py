"""Verification of a chain in its store: every document, object and state.

No statement of the chain is trusted. The weights are rebuilt from nothing and carried from version
to version; each edge (delta, anchor, skip) must lead from the state of its base to the state of its
version.
"""

from deltachain.verify.walk import EdgeProof, VersionProof, counted, edge_records, newest, verify

__all__ = ["EdgeProof", "VersionProof", "counted", "edge_records", "newest", "verify"]
