"""What is kept: the versions that a rule names, and the edges that lead to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, cast

from msgspec.structs import replace

from deltachain.errors import ConfigError
from deltachain.format.documents import EdgeSummary, PrunedKind, PrunedRange, PruneRecord
from deltachain.kinds import check_kinds, names_checked
from deltachain.types import Version


def span_of(edge: EdgeSummary) -> int:
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
    if record is None:
        return {}
    found = ((edge, record.range_of(edge.kind, edge.base, edge.version)) for edge in edges)
    return {edge: row.after for edge, row in found if row is not None}


def ended_in(record: PruneRecord | None, edges: Iterable[EdgeSummary]) -> set[EdgeSummary]:
    """Return the edges whose grace a record ended: no later record takes them back."""
    times = times_of(record, edges)
    return {edge for edge, after in times.items() if record is not None and after <= record.time}


def ends_a_grace(record: PruneRecord, now: float) -> bool:
    return any(record.time < row.after <= now for row in record.pruned)


def ranges(
    edges: Iterable[EdgeSummary], after: Mapping[EdgeSummary, float], now: float
) -> tuple[PrunedRange, ...]:
    """Return pruned edges as ranges that contain no other edge."""
    lines: dict[tuple[str, int], list[tuple[Version, PrunedRange | None]]] = defaultdict(list)
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


KEEP_LAST: Final = 1024
"""Newest versions that are kept by default."""

ANCHORS_KEPT: Final = 2
"""Newest anchors that are kept in any case, so that newcomers have a second way."""


@names_checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRule:
    """Rule of what pruning keeps. A version is kept if any part of the rule names it.

    Attributes:
        last: Number of newest versions; every edge among them is kept, for followers. Versions that
            the head's manifest lists are kept in any case.
        within_s: Seconds before the head's commit, by the publisher's clock; as for ``last``.
        every: Keep each version that this number divides; ``None`` for none.
        tags: Whether to keep every tagged version.
    """

    last: int = KEEP_LAST
    within_s: float | None = None
    every: int | None = None
    tags: bool = True

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.last < 1:
            raise ConfigError(f"last={self.last}: at least the newest version must be kept")
        if self.every is not None and self.every < 1:
            raise ConfigError(f"every={self.every}: expected a positive number of versions")
        if self.within_s is not None and self.within_s < 0:
            raise ConfigError(f"within_s={self.within_s}: expected a positive number of seconds")

    def kept(self, first: Version, tagged: Iterable[Version]) -> frozenset[Version]:
        multiples = range(0, first + 1, self.every) if self.every else range(0)
        old = (version for version in tagged if self.tags and version <= first)
        return frozenset({first, *multiples, *old})


def newest_edges(
    edges: Collection[EdgeSummary], there: Collection[EdgeSummary], *, first: Version
) -> set[EdgeSummary]:
    """Return the edges of the newest versions, from an anchor before them on, and newest anchors.

    That is the newest anchor from which every one of them can be reached that can be reached at
    all; where payloads were lost, a skip from before it may lead around them.
    """
    anchors = sorted((edge.version for edge in edges if edge.base is None), reverse=True)
    newest = {
        edge for edge in edges if edge.base is None and edge.version in anchors[:ANCHORS_KEPT]
    }
    wanted = {version for version in _reached(there) if version >= first}
    for begin in anchors:
        if begin <= first and wanted <= _reached(e for e in there if _begins(e) >= begin):
            return newest | {edge for edge in edges if _begins(edge) >= begin}
    return set(edges)


def _reached(edges: Iterable[EdgeSummary]) -> set[Version]:
    """Return the versions that edges, by version, lead to from nothing."""
    found: set[Version] = set()
    for edge in edges:
        if edge.base is None or edge.base in found:
            found.add(edge.version)
    return found


def _begins(edge: EdgeSummary) -> Version:
    return edge.version if edge.base is None else edge.base
