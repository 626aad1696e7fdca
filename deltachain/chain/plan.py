"""Plans: the cheapest sequence of edges from the held version to another, a pure function."""

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from deltachain.errors import BrokenChainError
from deltachain.format.documents import EdgeSummary, Manifest
from deltachain.types import Version

VERSIONS_LISTED: Final = 16
"""Versions whose edges a manifest lists completely. Listing more would save subscribers that are
far behind a few small reads, but make every manifest of a small model larger than its delta."""

SHORT_LISTED: Final = 4
"""Of a chain with small deltas, versions whose edges are listed by manifests of versions that this
number divides; those between list back to the last one of them."""

SMALL_DELTA: Final = 256 << 10
"""Mean size of deltas, in bytes, below which most manifests list few versions: 16 of them take 2.5
KB, a hundredth of this."""

ANCHORS_LISTED: Final = 2  # edges from nothing that every manifest lists, regardless of their age


@dataclass(frozen=True, slots=True)
class KnownEdges:
    """Edges known to the writer of the next manifest."""

    edges: tuple[EdgeSummary, ...] = ()
    first: Version = 0

    def after(self, manifest: Manifest, added: Iterable[EdgeSummary] = ()) -> "KnownEdges":
        """Return what is known after a commit, less what no later manifest lists."""
        first = manifest.window_from if not self.edges else min(self.first, manifest.window_from)
        first = max(first, window_from(manifest.version + 1))
        known = (*self.edges, *added, *manifest.recent, manifest.summary())
        return KnownEdges(_listed(known, first), first)

    def listed(
        self, version: Version, added: Iterable[EdgeSummary] = ()
    ) -> tuple[tuple[EdgeSummary, ...], Version]:
        """Return the edges to list in the manifest of ``version``, and its ``window_from``."""
        deltas = [edge.nbytes for edge in self.edges if edge.base == edge.version - 1]
        are_small = sum(deltas) <= SMALL_DELTA * len(deltas)
        is_short = are_small and version % VERSIONS_LISTED != 0
        first = max(self.first, window_from(version, is_short=is_short))
        return _listed((*self.edges, *added), first), first


def window_from(version: Version, *, is_short: bool = False) -> Version:
    """Return the oldest version whose edges the manifest of ``version`` lists completely."""
    if is_short:
        return max(0, version - (version % SHORT_LISTED or SHORT_LISTED))
    return max(0, version - VERSIONS_LISTED)


def windows_before(version: Version, count: int) -> Sequence[Version]:
    """Return the versions whose manifests a backward search may read, newest first."""
    last = max(-1, version - count * VERSIONS_LISTED)
    whole = version - version % VERSIONS_LISTED
    short = range(version - version % SHORT_LISTED, max(-1, whole - 1), -SHORT_LISTED)
    regular = range(whole, last, -VERSIONS_LISTED)
    strides = range(version, last, -VERSIONS_LISTED)
    return sorted({*short, *regular, *strides}, reverse=True)


def edge_id(edge: EdgeSummary) -> tuple[int, str, int, str]:
    """Return a unique key of an edge that sorts by version."""
    return edge.version, edge.kind, -1 if edge.base is None else edge.base, edge.record


def _listed(known: Iterable[EdgeSummary], first: Version) -> tuple[EdgeSummary, ...]:
    """Return each edge to ``first`` or later once, and the newest edges from nothing."""
    edges = sorted({edge_id(edge): edge for edge in known}.values(), key=edge_id)
    from_nothing = [edge for edge in edges if edge.base is None][-ANCHORS_LISTED:]
    return tuple(edge for edge in edges if edge.version >= first or edge in from_nothing)


REQUEST_NBYTES: Final = 1 << 18
"""Bytes that could be fetched in the time one more request takes (10 ms at 25 MB/s)."""

_NOTHING: Final = -1  # node of the graph: holding no version
_BEFORE: Final = -2  # node of the graph: holding some version older than all with known edges


_UNKNOWN: Final = (
    "install the package that provides this encoding, or upgrade deltachain; or publish an anchor"
)
"""Hint for edges that were ignored for their encoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Edges to apply, in order."""

    held: Version | None  # version held before; `None` for nothing
    target: Version
    edges: tuple[EdgeSummary, ...]  # edges in order; empty if `held` equals `target`

    @property
    def nbytes(self) -> int:
        return sum(edge.nbytes for edge in self.edges)

    @property
    def requests(self) -> int:
        """Number of objects to fetch: parts, and the document that lists them."""
        return sum(edge.parts + 1 for edge in self.edges)

    @property
    def cost(self) -> int:
        return sum(cost_of(edge) for edge in self.edges)

    def __str__(self) -> str:
        steps = [f"{e.kind}->{e.version} ({e.nbytes:,} B)" for e in self.edges]
        start = "nothing" if self.held is None else str(self.held)
        way = ", ".join(steps) or "nothing to do"
        return f"{start} to {self.target}: {way}; {self.nbytes:,} B, {self.requests} requests"


def cost_of(edge: EdgeSummary) -> int:
    return edge.nbytes + (edge.parts + 1) * REQUEST_NBYTES


def make_plan(
    held: Version | None,
    target: Version,
    edges: Iterable[EdgeSummary],
    *,
    encodings: Collection[str],
) -> Plan:
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
    if not unknown:
        return ""
    more = f" and {len(unknown) - 1} more" if unknown[1:] else ""
    return f"; edges in the unknown encoding {unknown[0][:80]!r}{more} were left out"


def least_from_before(
    reached: Version, target: Version, edges: Iterable[EdgeSummary], *, encodings: Collection[str]
) -> int | None:
    """Return a lower bound of the cost from any version before ``reached`` to ``target``."""
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
