"""One rank's part of an edge, and the edge of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from deltachain.format.documents import Edge
from deltachain.store import Store
from deltachain.types import StateDigest


class EdgeShare(msgspec.Struct, frozen=True):
    """One rank's part of an edge.

    Attributes:
        edge: Edge with the rank's payload objects.
        state: Contribution of the rank's weights to the state digest.
        nnz: Number of changed elements.
        requests: Number of store requests.
        upload_s: Time in which at least one object was uploaded, in seconds.
    """

    edge: Edge
    state: StateDigest
    nnz: int
    requests: int
    upload_s: float = 0.0


def revealed(store: Store, shares: Sequence[EdgeShare]) -> Edge:
    """Join the parts of all ranks in one edge, and make them visible, in one request if possible.

    Raises:
        StoreError: Some of them may not be visible.
    """
    edge = joined(shares)
    store.reveal({part.key: part.pin for part in edge.parts})
    return edge


def joined(shares: Sequence[EdgeShare]) -> Edge:
    """Join the parts of all ranks in one edge."""
    edges = [share.edge for share in shares]
    return Edge(
        kind=edges[0].kind,
        base=edges[0].base,
        encodings=tuple(sorted({name for edge in edges for name in edge.encodings})),
        parts=tuple(part for edge in edges for part in edge.parts),
    )
