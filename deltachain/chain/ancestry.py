"""Backward search through manifests: plans for a version, and versions of a state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final

from deltachain.chain.head_hint import read_hint
from deltachain.chain.log import Committed, Manifests
from deltachain.chain.plan import Plan, least_from_before, make_plan
from deltachain.chain.recent_edges import VERSIONS_LISTED, edge_id, newest_start
from deltachain.errors import BrokenChainError
from deltachain.format.documents import EdgeSummary, Manifest
from deltachain.store import Store
from deltachain.types import StateDigest, Version

STATE_WINDOWS: Final = 4
"""Windows searched for a state. A target with older, unidentified bits starts from nothing, which
costs less than reading a long history."""

PLAN_WINDOWS: Final = 24
"""Windows read for a plan from the held version when a plan from nothing is known."""


class Past:
    """The history of a chain, read from the edge lists of few manifests.

    Args:
        store: Store of the chain.
        manifests: Manifests of the chain.
    """

    def __init__(self, store: Store, manifests: Manifests) -> None:
        self._store = store
        self._manifests = manifests

    def find_state(self, state: StateDigest, head: Committed | None) -> Committed | None:
        """Find the newest version with a state, among recent versions and version 0.

        The search ends where a plan from nothing would stop reading.
        """
        if head is None:
            return None
        start = newest_start((*head.manifest.recent, head.manifest.summary()))
        for count, committed in enumerate(self._back(head, STATE_WINDOWS), 1):
            manifest = committed.manifest
            if committed.state == state:
                return committed
            states = {edge.version: edge.state for edge in manifest.recent}
            for version in sorted(states, reverse=True):
                if states[version] == str(state):
                    return self._manifests.find(version)
            if count >= STATE_WINDOWS and start is not None and manifest.window_from <= start:
                break
        first = self._manifests.find(0)
        return first if first and first.state == state else None

    def plan(
        self,
        held: Version | None,
        target: Committed,
        *,
        encodings: Collection[str],
        avoid: Collection[EdgeSummary],
    ) -> Plan:
        """Find the cheapest plan from ``held`` to a committed version; see :func:`plan.make_plan`.

        Reads older manifests until none can yield a cheaper plan, at most ``PLAN_WINDOWS``.

        Raises:
            BrokenChainError: No plan exists.
        """
        version = target.version
        later = self._manifests.find(version + 1)  # lists an anchor of this version
        hinted = [edge for edge in read_hint(self._store).anchors if edge.version <= version]
        search = _Search(held, version, encodings, avoid)
        search.add([*hinted, *(later.manifest.recent if later else ())])
        for count, committed in enumerate(self._back(target, PLAN_WINDOWS), 1):
            manifest = committed.manifest
            search.add((*manifest.recent, manifest.summary()))
            plan = search.plan(manifest.window_from, is_last=count >= PLAN_WINDOWS)
            if plan is not None:
                return plan
        return search.end()

    def _back(self, newest: Committed, expected: int) -> Iterator[Committed]:
        """Yield manifests whose windows together cover the history, newest first.

        A missing manifest is replaced by a near one. Ends at version 0, or at a gap that is wider
        than a window.

        Args:
            newest: The first manifest.
            expected: Number of manifests to prefetch.
        """
        yield newest
        first = newest.manifest.window_from
        self._manifests.looks.ahead(
            range(first, max(-1, first - expected * VERSIONS_LISTED), -VERSIONS_LISTED)
        )
        committed = self._before(newest.manifest)
        while committed is not None:
            yield committed
            committed = self._before(committed.manifest)

    def _before(self, manifest: Manifest) -> Committed | None:
        first, last = min(manifest.window_from, manifest.version - 1), manifest.version - 1
        nearer = [first, *(first + (1 << n) for n in range(5) if first + (1 << n) < last), last]
        for version in dict.fromkeys(nearer) if last >= 0 else ():
            found = self._manifests.find(version)
            if found is not None:
                return found
        return None


class _Search:
    """Known edges, and whether they suffice for the cheapest plan."""

    def __init__(
        self,
        held: Version | None,
        version: Version,
        encodings: Collection[str],
        avoid: Collection[EdgeSummary],
    ) -> None:
        self._held = held
        self._version = version
        self._encodings = encodings
        self._avoid = avoid
        self._edges: dict[tuple[int, str, int, str], EdgeSummary] = {}
        self._start: Version = -1

    def add(self, edges: Iterable[EdgeSummary]) -> None:
        """Add the usable ones of ``edges``."""
        for edge in edges:
            if edge.version <= self._version and edge not in self._avoid:
                self._edges[edge_id(edge)] = edge
                if edge.base is None:
                    self._start = max(self._start, edge.version)

    def plan(self, reached: Version, *, is_last: bool) -> Plan | None:
        """Return the cheapest plan if the edges back to version ``reached`` determine it.

        Args:
            reached: The oldest version whose edges are all known.
            is_last: Accept a plan from nothing even if one from the held version may be cheaper.

        Raises:
            BrokenChainError: No plan exists, and older edges cannot help.
        """
        held = self._held if self._held is not None and self._held <= self._version else None
        from_held = held is not None and reached <= held
        if not from_held and reached > self._start:
            return None
        edges, encodings = self._edges.values(), self._encodings
        least = least_from_before(reached, self._version, edges, encodings=encodings)
        if least is None:
            return self.end()
        try:
            plan = self.end()
        except BrokenChainError:
            return None
        return plan if from_held or held is None or plan.cost <= least or is_last else None

    def end(self) -> Plan:
        """Return the cheapest plan over all known edges.

        Raises:
            BrokenChainError: No plan exists.
        """
        return make_plan(self._held, self._version, self._edges.values(), encodings=self._encodings)
