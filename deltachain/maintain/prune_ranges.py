"""Pruned edges as the ranges of a record, decided without a store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import cast

from deltachain.format.documents import EdgeSummary
from deltachain.format.prune_record import PrunedKind, PrunedRange, PruneRecord


def span_of(edge: EdgeSummary) -> int:
    """Return the versions from an edge's base to its version; 0 from nothing."""
    return 0 if edge.base is None else edge.version - edge.base


def prunable(edges: Iterable[EdgeSummary], stay: Collection[EdgeSummary]) -> set[EdgeSummary]:
    """Return the edges that need not stay.

    A base checkpoint is never pruned, nor an edge that a range cannot tell from one that stays: a
    version may have two anchors.
    """
    places = {(edge.kind, span_of(edge), edge.version) for edge in stay}
    return {
        edge
        for edge in edges
        if edge.kind != "base" and (edge.kind, span_of(edge), edge.version) not in places
    }


def times_of(record: PruneRecord | None, edges: Iterable[EdgeSummary]) -> dict[EdgeSummary, float]:
    """Return the earliest time of deletion of each edge that a record names."""
    if record is None:
        return {}
    found = ((edge, record.range_of(edge.kind, edge.base, edge.version)) for edge in edges)
    return {edge: row.after for edge, row in found if row is not None}


def ranges(
    edges: Iterable[EdgeSummary], after: Mapping[EdgeSummary, float], now: float
) -> tuple[PrunedRange, ...]:
    """Return pruned edges as ranges that contain no other edge.

    Args:
        edges: All edges.
        after: Earliest time of deletion of each pruned one.
        now: Time of the store; times up to it need not be told apart.
    """
    lines: dict[tuple[str, int], list[EdgeSummary]] = defaultdict(list)
    for edge in edges:
        if edge.kind != "base":
            lines[edge.kind, span_of(edge)].append(edge)
    found: list[PrunedRange] = []
    for (kind, span), line in sorted(lines.items()):
        runs: list[list[EdgeSummary]] = []
        previous: EdgeSummary | None = None
        for edge in sorted(line, key=lambda edge: edge.version):
            if edge in after:
                if previous in after and _alike(after[runs[-1][-1]], after[edge], now):
                    runs[-1].append(edge)
                else:
                    runs.append([edge])
            previous = edge
        found += [_range(kind, span, run, after) for run in runs]
    return tuple(found)


def _alike(one: float, other: float, now: float) -> bool:
    return one == other or max(one, other) <= now


def _range(
    kind: str, span: int, run: Collection[EdgeSummary], after: Mapping[EdgeSummary, float]
) -> PrunedRange:
    versions = [edge.version for edge in run]
    return PrunedRange(
        kind=cast("PrunedKind", kind),
        span=span,
        first=min(versions),
        last=max(versions),
        after=max(after[edge] for edge in run),
    )
