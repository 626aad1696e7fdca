"""Pruned edges as the ranges of a record, decided without a store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import cast

from msgspec.structs import replace

from deltachain.format.documents import EdgeSummary
from deltachain.format.prune_record import PrunedKind, PrunedRange, PruneRecord
from deltachain.types import Version


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


def ended_in(record: PruneRecord | None, edges: Iterable[EdgeSummary]) -> set[EdgeSummary]:
    """Return the edges whose grace a record ended: no later record takes them back."""
    times = times_of(record, edges)
    return {edge for edge, after in times.items() if record is not None and after <= record.time}


def ends_a_grace(record: PruneRecord, now: float) -> bool:
    """Return whether a grace that was running when a record was made is over."""
    return any(record.time < row.after <= now for row in record.pruned)


def ranges(
    edges: Iterable[EdgeSummary],
    after: Mapping[EdgeSummary, float],
    now: float,
    forgotten: Iterable[PrunedRange] = (),
) -> tuple[PrunedRange, ...]:
    """Return pruned edges as ranges that contain no other edge.

    Args:
        edges: All edges that are not forgotten.
        after: Earliest time of deletion of each pruned one.
        now: Time of the store; times up to it need not be told apart.
        forgotten: Ranges of pruned edges that are not among ``edges``.
    """
    lines: dict[tuple[str, int], list[tuple[Version, PrunedRange | None]]] = defaultdict(list)
    for row in forgotten:
        lines[row.kind, row.span].append((row.first, row))
    for edge in edges:
        if edge.kind != "base":
            own = _range(edge, after[edge]) if edge in after else None
            lines[edge.kind, span_of(edge)].append((edge.version, own))
    found: list[PrunedRange] = []
    for _, line in sorted(lines.items()):
        previous: PrunedRange | None = None
        for _, one in sorted(line, key=lambda place: place[0]):
            if one is not None and previous is not None and _alike(previous, one, now):
                found.pop()
                last, late = max(previous.last, one.last), max(previous.after, one.after)
                one = replace(previous, last=last, after=late)  # noqa: PLW2901 - both in one
            if one is not None:
                found.append(one)
            previous = one
    return tuple(found)


def _alike(one: PrunedRange, other: PrunedRange, now: float) -> bool:
    return one.after == other.after or max(one.after, other.after) <= now


def _range(edge: EdgeSummary, after: float) -> PrunedRange:
    kind, version = cast("PrunedKind", edge.kind), edge.version
    return PrunedRange(kind=kind, span=span_of(edge), first=version, last=version, after=after)
