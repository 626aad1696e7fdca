"""Which skips and anchors a chain lacks, decided without a store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Final

from deltachain.chain.anchor_cost import Replay, anchor_due
from deltachain.chain.plan import Plan, make_plan
from deltachain.chain.skips import ANCHOR_AT, Hop
from deltachain.chain.upload import DENSE_SHARE
from deltachain.errors import BrokenChainError
from deltachain.format.documents import EdgeSummary
from deltachain.types import Version

PART_NBYTES: Final = 2048
"""Size of the header, directory and digests of a small part, about, which folding saves."""


def skips_due(
    edges: Collection[EdgeSummary],
    span: int,
    *,
    known: Collection[EdgeSummary],
    head: Version,
    model_nbytes: int,
) -> Iterator[tuple[Hop, Plan]]:
    """Yield missing skips of one span and the edges to fold, newest first.

    Edges that together are larger than an anchor are not folded: a way over an anchor costs less.

    Args:
        edges: All usable edges of the chain.
        span: Versions between base and version of the skips.
        known: All edges with a record, pruned ones too.
        head: The newest version.
        model_nbytes: Size of all weights, in bytes.
    """
    there = {(edge.base, edge.version) for edge in known}
    leads: dict[Version, list[EdgeSummary]] = defaultdict(list)
    for edge in edges:
        if edge.base is not None:
            leads[edge.version].append(edge)
    oldest = min(
        (edge.base for line in leads.values() for edge in line if edge.base is not None),
        default=head,
    )
    for version in range(head - head % span, oldest + span - 1, -span):
        hop = Hop(version - span, version)
        has_delta = any(edge.base == version - 1 for edge in leads[version])
        plan = _fold(hop, leads) if has_delta and hop not in there else None
        if plan is not None:
            saved = PART_NBYTES * sum(edge.parts for edge in plan.edges)
            if plan.nbytes - saved <= DENSE_SHARE * model_nbytes:
                yield hop, plan


def _fold(hop: Hop, leads: dict[Version, list[EdgeSummary]]) -> Plan | None:
    """Return the edges to fold into a skip; ``None`` if some are missing."""
    versions = range(hop.base + 1, hop.version + 1)
    inside = [
        edge
        for version in versions
        for edge in leads.get(version, ())
        if (edge.base or 0) >= hop.base
    ]
    names = {name for edge in inside for name in edge.encodings}
    try:
        return make_plan(hop.base, hop.version, inside, encodings=names)
    except BrokenChainError:
        return None


def anchor_version(
    edges: Collection[EdgeSummary],
    *,
    head: Version,
    model_nbytes: int,
    manifest_nbytes: int,
    every: Version | None = None,
) -> Version | None:
    """Return the version that needs an anchor; ``None`` if none is due.

    Args:
        edges: All usable edges of the chain.
        head: The newest version.
        model_nbytes: Size of all weights, in bytes.
        manifest_nbytes: Size of a manifest, in bytes, about.
        every: Number of versions between two anchors; by default as their bytes say, see
            :func:`anchor_due`.
    """
    anchors = [edge for edge in edges if edge.base is None]
    newest = max(anchors, key=lambda edge: edge.version, default=None)
    aligned = head - head % ANCHOR_AT
    if newest is None or newest.version >= aligned:
        return None
    versions = aligned - newest.version
    later = (
        edge for edge in edges if edge.kind == "delta" and newest.version < edge.version <= aligned
    )
    replay = Replay(
        versions=versions,
        deltas=sum(edge.nbytes for edge in later),
        manifests=versions * manifest_nbytes,
    )
    size = newest.nbytes or int(DENSE_SHARE * model_nbytes)
    return aligned if anchor_due(replay, size, every=every) else None
