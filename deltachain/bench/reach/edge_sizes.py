"""Sizes of edges and their parts, from what was measured."""

from __future__ import annotations

from math import ceil
from typing import Final

from deltachain.bench.reach.settings import DENSITY, SHARES, ModelSize
from deltachain.chain.upload import DENSE_SHARE, EdgeKeys, anchor_part_nbytes
from deltachain.format.documents import Edge, ObjectRef
from deltachain.format.keys import PayloadKind, payload_key
from deltachain.maintain.added_edges import PART_NBYTES
from deltachain.types import Version

CHANGE_NBYTES: Final = 10
"""Bytes of a change in memory, by which parts are cut: an index, and a bf16 value."""

PARTS: Final = 8
"""Parts of a delta at most, about, as with ``PublishConfig(part_nbytes=...)`` of a large model."""

_DIGEST: Final = "0" * 64


def edge_nbytes(model: ModelSize, span: int) -> int:
    """Return the size of an edge over some versions, in bytes.

    Args:
        model: The model.
        span: Number of versions; 0 for an anchor.
    """
    anchor = DENSE_SHARE * model.nbytes
    return round(anchor if span == 0 else anchor * SHARES[span])


def part_nbytes(model: ModelSize, span: int) -> int:
    """Return the size of a full part of such an edge, in bytes."""
    changes = DENSITY * model.numel * CHANGE_NBYTES
    limit = max(PART_NBYTES, ceil(changes / PARTS))
    if span == 0:
        return ceil(DENSE_SHARE * anchor_part_nbytes(model.nbytes, limit))
    return ceil(edge_nbytes(model, 1) * min(1.0, limit / changes))


def make_edge(model: ModelSize, version: Version, base: Version | None, kind: PayloadKind) -> Edge:
    """Return an edge with parts of these sizes."""
    span = 0 if base is None else version - base
    left, most = edge_nbytes(model, span), part_nbytes(model, span)
    keys = EdgeKeys(kind=kind, version=version, epoch=0, commit_id="0" * 32)
    parts: list[ObjectRef] = []
    while left > 0:
        key = payload_key(kind, version, keys.epoch, keys.commit_id, len(parts))
        parts.append(ObjectRef(key=key, nbytes=min(left, most), blake3=_DIGEST))
        left -= most
    return Edge(kind=kind, base=base, encodings=("step",), parts=tuple(parts))
