"""The recent edges listed in a manifest, so that planning need not read every manifest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

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

ANCHORS_LISTED: Final = 2
"""Edges from nothing that every manifest lists, regardless of their age."""


@dataclass(frozen=True, slots=True)
class KnownEdges:
    """Edges known to the writer of the next manifest.

    Attributes:
        edges: Edges in the order of :func:`edge_id`.
        first: The oldest version whose edges are all among them.
    """

    edges: tuple[EdgeSummary, ...] = ()
    first: Version = 0

    def after(self, manifest: Manifest, added: Iterable[EdgeSummary] = ()) -> KnownEdges:
        """Return what is known after a commit, less what no later manifest lists.

        Args:
            manifest: The committed manifest.
            added: Edges that :meth:`listed` was given for it.
        """
        first = manifest.window_from if not self.edges else min(self.first, manifest.window_from)
        first = max(first, window_from(manifest.version + 1))
        known = (*self.edges, *added, *manifest.recent, manifest.summary())
        return KnownEdges(_listed(known, first), first)

    def listed(
        self, version: Version, added: Iterable[EdgeSummary] = ()
    ) -> tuple[tuple[EdgeSummary, ...], Version]:
        """Return the edges to list in the manifest of ``version``, and its ``window_from``.

        Args:
            version: The version after all of ``edges``.
            added: Edges recorded since the last commit.
        """
        is_short = _are_small(self.edges) and version % VERSIONS_LISTED != 0
        first = max(self.first, window_from(version, is_short=is_short))
        return _listed((*self.edges, *added), first), first


def listed_edges(
    parent: Manifest | None, added: Iterable[EdgeSummary] = ()
) -> tuple[EdgeSummary, ...]:
    """Return all recent edges for the manifest after ``parent``, oldest first.

    Args:
        parent: The previous manifest; ``None`` for version 0.
        added: Edges recorded since ``parent`` was committed.
    """
    if parent is None:
        return ()
    known = (*parent.recent, parent.summary(), *added)
    return _listed(known, window_from(parent.version + 1))


def window_from(version: Version, *, is_short: bool = False) -> Version:
    """Return the oldest version whose edges the manifest of ``version`` lists completely.

    Args:
        version: The version.
        is_short: Whether the manifest lists few versions.
    """
    if is_short:
        return max(0, version - (version % SHORT_LISTED or SHORT_LISTED))
    return max(0, version - VERSIONS_LISTED)


def windows_before(version: Version, count: int) -> Sequence[Version]:
    """Return the versions whose manifests a backward search may read, newest first.

    Args:
        version: The first manifest of the search, or what its list ends with.
        count: Number of complete lists to cover.
    """
    last = max(-1, version - count * VERSIONS_LISTED)
    whole = version - version % VERSIONS_LISTED
    short = range(version - version % SHORT_LISTED, max(-1, whole - 1), -SHORT_LISTED)
    regular = range(whole, last, -VERSIONS_LISTED)
    strides = range(version, last, -VERSIONS_LISTED)
    return sorted({*short, *regular, *strides}, reverse=True)


def edge_id(edge: EdgeSummary) -> tuple[int, str, int, str]:
    """Return a unique key of an edge that sorts by version."""
    return edge.version, edge.kind, -1 if edge.base is None else edge.base, edge.record


def newest_start(edges: Iterable[EdgeSummary]) -> Version | None:
    """Return the newest version that an edge reaches from nothing; ``None`` without one."""
    return max((edge.version for edge in edges if edge.base is None), default=None)


def _listed(known: Iterable[EdgeSummary], first: Version) -> tuple[EdgeSummary, ...]:
    """Return each edge to ``first`` or later once, and the newest edges from nothing."""
    edges = sorted({edge_id(edge): edge for edge in known}.values(), key=edge_id)
    from_nothing = [edge for edge in edges if edge.base is None][-ANCHORS_LISTED:]
    return tuple(edge for edge in edges if edge.version >= first or edge in from_nothing)


def _are_small(edges: Iterable[EdgeSummary]) -> bool:
    """Return whether deltas are small on average; true without any."""
    deltas = [edge.nbytes for edge in edges if edge.base == edge.version - 1]
    return sum(deltas) <= SMALL_DELTA * len(deltas)
