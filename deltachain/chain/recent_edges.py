"""The recent edges that a manifest lists, so that a planner need not read every manifest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from deltachain.format.documents import EdgeSummary, Manifest
from deltachain.types import Version

WINDOW: Final = 16
"""Versions whose edges a manifest lists completely. More would spare those who are far behind some
small reads, and cost every version of a small model more than its delta should."""

ANCHORS_LISTED: Final = 2
"""Edges from nothing that every manifest lists, however old they are."""


def window(parent: Manifest | None, added: Iterable[EdgeSummary] = ()) -> tuple[EdgeSummary, ...]:
    """The recent edges that the manifest after ``parent`` lists, oldest first.

    Args:
        parent: The manifest before.
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
    """The oldest version whose edges the manifest of ``version`` lists completely."""
    return max(0, version - WINDOW)


def edge_id(edge: EdgeSummary) -> tuple[int, str, int, str]:
    """What tells one edge from another; sorts by version."""
    return edge.version, edge.kind, -1 if edge.base is None else edge.base, edge.record


def newest_start(edges: Iterable[EdgeSummary]) -> Version | None:
    """The newest version that an edge reaches from nothing."""
    return max((edge.version for edge in edges if edge.base is None), default=None)
