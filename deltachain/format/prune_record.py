"""Prune records: edges that planners must not use, because their objects are or will be deleted."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

from deltachain.format.documents import Count, Document, EdgeSummary, Struct
from deltachain.types import Version

PrunedKind = Literal["delta", "anchor", "skip"]


class PrunedRange(Struct, frozen=True, kw_only=True):
    """Pruned edges of one kind and span, to a range of versions.

    Attributes:
        kind: Kind of the edges.
        span: Versions from their base to the version that they lead to; 0 for anchors.
        first: The first version that they lead to.
        last: The last one, included.
        after: Earliest time of deletion of their objects, in seconds since 1970 by the clock of the
            store.
    """

    kind: PrunedKind
    span: Count
    first: Count
    last: Count
    after: float

    def __post_init__(self) -> None:
        fits = {"delta": self.span == 1, "anchor": self.span == 0, "skip": self.span > 1}
        if not fits[self.kind]:
            raise ValueError(f"a pruned {self.kind} cannot have span {self.span}")
        if self.first > self.last:
            raise ValueError(f"a range of versions from {self.first} to {self.last}")

    def covers(self, kind: str, base: Version | None, version: Version) -> bool:
        """Return whether an edge is in the range."""
        span = 0 if base is None else version - base
        return (kind, span) == (self.kind, self.span) and self.first <= version <= self.last


def range_of(
    rows: Sequence[PrunedRange], kind: str, base: Version | None, version: Version
) -> PrunedRange | None:
    """Return the range that an edge is in, in O(log n); ``None`` if there is none.

    Args:
        rows: Ranges sorted by kind, span and first version, which do not overlap.
        kind: Kind of the edge.
        base: Base of the edge; ``None`` if it has none.
        version: The version that the edge leads to.
    """
    span = 0 if base is None else version - base
    place = bisect_right(
        rows, (kind, span, version), key=lambda row: (row.kind, row.span, row.first)
    )
    row = rows[place - 1] if place else None
    return row if row is not None and row.covers(kind, base, version) else None


def closes(rows: Sequence[PrunedRange], version: Version) -> bool:
    """Return whether ranges contain the delta to a version; for ``rows`` see :func:`range_of`."""
    return range_of(rows, "delta", version - 1, version) is not None


class PruneRecord(Document, frozen=True, kw_only=True):
    """All edges pruned so far: a later record replaces an earlier one.

    Attributes:
        chain: Id of the chain.
        number: Number of the record, from 0.
        head: The newest version when the record was made.
        maintainer: Random id of the process that made it.
        time: Seconds since 1970 by the clock of the store.
        pruned: Pruned edges, sorted by kind, span and first version; ranges do not overlap.
    """

    chain: str
    number: Count
    head: Count
    maintainer: str
    time: float
    pruned: tuple[PrunedRange, ...] = ()

    def __post_init__(self) -> None:
        if any(row.last > self.head for row in self.pruned):
            raise ValueError(f"prune record {self.number}: prunes versions after {self.head}")
        rows = [(row.kind, row.span, row.first, row.last) for row in self.pruned]
        for one, other in itertools.pairwise(rows):
            if one[:2] > other[:2] or (one[:2] == other[:2] and one[3] >= other[2]):
                raise ValueError(f"prune record {self.number}: ranges are not sorted")

    def range_of(self, kind: str, base: Version | None, version: Version) -> PrunedRange | None:
        """Return the range that an edge is in, in O(log n); ``None`` if it is not pruned."""
        return range_of(self.pruned, kind, base, version)

    def covers(self, edge: EdgeSummary) -> bool:
        """Return whether an edge is pruned."""
        return self.range_of(edge.kind, edge.base, edge.version) is not None

    def closes(self, version: Version) -> bool:
        """Return whether nothing may be added to a version, because the delta to it is pruned.

        Parts of a skip or an anchor that come late would be taken for orphans.
        """
        return closes(self.pruned, version)
