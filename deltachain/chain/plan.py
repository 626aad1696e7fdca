"""Plans: the cheapest sequence of edges from the held version to another, a pure function."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from deltachain.errors import BrokenChainError
from deltachain.format.documents import EdgeSummary
from deltachain.types import Version

REQUEST_NBYTES: Final = 1 << 18
"""Bytes that could be fetched in the time one more request takes (10 ms at 25 MB/s)."""

_NOTHING: Final = -1
"""Node of the graph: holding no version."""

_BEFORE: Final = -2
"""Node of the graph: holding some version older than all with known edges."""


_UNKNOWN: Final = (
    "install the package that provides this encoding, or upgrade deltachain; or publish an anchor"
)
"""Hint for edges that were ignored for their encoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Edges to apply, in order.

    Attributes:
        held: Version held before; ``None`` for nothing.
        target: Version held afterwards.
        edges: Edges in order; empty if ``held`` equals ``target``.
    """

    held: Version | None
    target: Version
    edges: tuple[EdgeSummary, ...]

    @property
    def nbytes(self) -> int:
        """Size of the payload to fetch, in bytes."""
        return sum(edge.nbytes for edge in self.edges)

    @property
    def requests(self) -> int:
        """Number of objects to fetch: parts, and the document that lists them."""
        return sum(edge.parts + 1 for edge in self.edges)

    @property
    def cost(self) -> int:
        """Cost in bytes: the payload, plus ``REQUEST_NBYTES`` a request."""
        return sum(cost_of(edge) for edge in self.edges)

    def __str__(self) -> str:
        steps = [f"{e.kind}->{e.version} ({e.nbytes:,} B)" for e in self.edges]
        start = "nothing" if self.held is None else str(self.held)
        way = ", ".join(steps) or "nothing to do"
        return f"{start} to {self.target}: {way}; {self.nbytes:,} B, {self.requests} requests"


def cost_of(edge: EdgeSummary) -> int:
    """Return the cost of one edge, in bytes."""
    return edge.nbytes + (edge.parts + 1) * REQUEST_NBYTES


def make_plan(
    held: Version | None,
    target: Version,
    edges: Iterable[EdgeSummary],
    *,
    encodings: Collection[str],
) -> Plan:
    """Find the cheapest plan from ``held`` to ``target``.

    Args:
        held: The version held; edges that start from nothing are usable from any version.
        target: The version to reach.
        edges: Known edges, in any order.
        encodings: Supported encodings; edges with others are ignored.

    Raises:
        BrokenChainError: No plan exists.
    """
    edges = tuple(edges)
    outgoing: dict[int, list[EdgeSummary]] = {}
    for edge in _usable(edges, encodings):
        outgoing.setdefault(_NOTHING if edge.base is None else edge.base, []).append(edge)
    if held is not None:  # starting over from nothing is always possible
        outgoing.setdefault(held, []).extend(outgoing.get(_NOTHING, ()))
    start = _NOTHING if held is None else held
    came_by = _shortest(start, target, outgoing)
    if target != start and target not in came_by:
        origin = "nothing" if held is None else f"version {held}"
        unknown = sorted({n for edge in edges for n in edge.encodings if n not in encodings})
        raise BrokenChainError(
            f"no known edges lead from {origin} to version {target}{_left_out(unknown)}",
            version=target,
            hint=_UNKNOWN if unknown else "",
        )
    return Plan(held=held, target=target, edges=tuple(_walk_back(start, target, came_by)))


def _left_out(unknown: Sequence[str]) -> str:
    """Return the part of an error message on edges in unknown encodings."""
    if not unknown:
        return ""
    more = f" and {len(unknown) - 1} more" if unknown[1:] else ""
    return f"; edges in the unknown encoding {unknown[0][:80]!r}{more} were left out"


def least_from_before(
    reached: Version, target: Version, edges: Iterable[EdgeSummary], *, encodings: Collection[str]
) -> int | None:
    """Return a lower bound of the cost from any version before ``reached`` to ``target``.

    Args:
        reached: The oldest version whose edges are all known.
        target: The version to reach.
        edges: Known edges.
        encodings: Supported encodings.

    Returns:
        Cost in bytes; ``None`` if no edges lead there, so that older edges cannot help.
    """
    outgoing: dict[int, list[EdgeSummary]] = {}
    for edge in _usable(edges, encodings):
        if edge.base is not None:
            outgoing.setdefault(_BEFORE if edge.base < reached else edge.base, []).append(edge)
    came_by = _shortest(_BEFORE, target, outgoing)
    if target not in came_by:
        return None
    return sum(cost_of(edge) for edge in _walk_back(_BEFORE, target, came_by, before=reached))


def _usable(edges: Iterable[EdgeSummary], encodings: Collection[str]) -> Iterator[EdgeSummary]:
    return (edge for edge in edges if all(name in encodings for name in edge.encodings))


def _shortest(
    start: int, target: int, outgoing: dict[int, list[EdgeSummary]]
) -> dict[int, EdgeSummary]:
    """Run Dijkstra's algorithm; return the last edge of the cheapest path to each node."""
    came_by: dict[int, EdgeSummary] = {}
    cost = {start: 0}
    queue = [(0, start)]
    while queue:
        so_far, node = heapq.heappop(queue)
        if node == target:
            break
        if so_far > cost[node]:
            continue
        for edge in outgoing.get(node, ()):
            total = so_far + cost_of(edge)
            if total < cost.get(edge.version, total + 1):
                cost[edge.version] = total
                came_by[edge.version] = edge
                heapq.heappush(queue, (total, edge.version))
    return came_by


def _walk_back(
    start: int, target: int, came_by: dict[int, EdgeSummary], *, before: Version = 0
) -> Iterator[EdgeSummary]:
    way = []
    node = target
    while node != start:
        edge = came_by[node]
        way.append(edge)
        if edge.base is None or edge.base < before:
            break
        node = edge.base
    return reversed(way)
