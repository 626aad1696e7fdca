"""The recent edges listed in a manifest, so that planning need not read every manifest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from deltachain.format.documents import EdgeSummary, Manifest
from deltachain.types import Version

VERSIONS_LISTED: Final = 16
"""Versions whose edges a manifest lists completely. Listing more would save subscribers that are
far behind a few small reads, but make every manifest of a small model larger than its delta."""

ANCHORS_LISTED: Final = 2
"""Edges from nothing that every manifest lists, regardless of their age."""


def listed_edges(
    parent: Manifest | None, added: Iterable[EdgeSummary] = ()
) -> tuple[EdgeSummary, ...]:
    """Return the edges to list in the manifest after ``parent``, oldest first.

    Args:
        parent: The previous manifest; ``None`` for version 0.
        added: Edges recorded since ``parent`` was committed.
    """
    if parent is None:
        return ()
    known = (*parent.recent, parent.summary(), *added)
    edges = sorted({edge_id(edge): edge for edge in known}.values(), key=edge_id)
    first = window_from(parent.version + 1)
    from_nothing = [edge for edge in edges if edge.base is None][-ANCHORS_LISTED:]
    return tuple(edge for edge in edges if edge.version >= first or edge in from_nothing)


def window_from(version: Version) -> Version:
    """Return the oldest version whose edges the manifest of ``version`` lists completely."""
    return max(0, version - VERSIONS_LISTED)


def edge_id(edge: EdgeSummary) -> tuple[int, str, int, str]:
    """Return a unique key of an edge that sorts by version."""
    return edge.version, edge.kind, -1 if edge.base is None else edge.base, edge.record


def newest_start(edges: Iterable[EdgeSummary]) -> Version | None:
    """Return the newest version that an edge reaches from nothing; ``None`` without one."""
    return max((edge.version for edge in edges if edge.base is None), default=None)
