"""The past of a chain, read back from its newest manifest: ways to a version, and its state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final

from deltachain.chain.head_hint import read_hint
from deltachain.chain.log import Committed, Manifests
from deltachain.chain.plan import Plan, least_from_before, make_plan
from deltachain.chain.recent_edges import WINDOW, edge_id, newest_start
from deltachain.errors import BrokenChainError
from deltachain.format.documents import EdgeSummary, Manifest
from deltachain.store import Store
from deltachain.types import StateDigest, Version

STATE_WINDOWS: Final = 4
"""Windows that are searched for a state. Who holds older bits and does not know it joins from
nothing, which costs less than reading a long past."""

PLAN_WINDOWS: Final = 24
"""Windows that are read for a way from what is held, where one from nothing is known already."""


class Past:
    """What the manifests of a chain tell of its past, each by its window.

    Args:
        store: Where the chain lies.
        manifests: Its manifests.
    """

    def __init__(self, store: Store, manifests: Manifests) -> None:
        self._store = store
        self._manifests = manifests

    def find_state(self, state: StateDigest, head: Committed | None) -> Committed | None:
        """The newest version that has a state, among the newest versions and the first.

        Older ones are searched only as far as a plan from nothing has to read.
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
        """The cheapest way from ``held`` to a committed version; see :func:`plan.make_plan`.

        Older manifests are read until a cheaper way cannot come from them, or ``PLAN_WINDOWS`` of
        them have not shown one.

        Raises:
            BrokenChainError: No way leads there.
        """
        version = target.version
        later = self._manifests.find(version + 1)  # lists the anchor of this version, if it has one
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
        """Manifests whose windows together cover the past, newest first.

        One that is missing is replaced by one near to it. The last is the first version's, or the
        oldest behind a gap that no window spans.

        Args:
            newest: Where to begin.
            expected: How many will be asked for, as far as is known.
        """
        yield newest
        first = newest.manifest.window_from
        self._manifests.looks.ahead(range(first, max(-1, first - expected * WINDOW), -WINDOW))
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
    """The edges that are known so far, and whether they hold all that a good plan needs."""

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
        """Take edges that can be used."""
        for edge in edges:
            if edge.version <= self._version and edge not in self._avoid:
                self._edges[edge_id(edge)] = edge
                if edge.base is None:
                    self._start = max(self._start, edge.version)

    def plan(self, reached: Version, *, is_last: bool) -> Plan | None:
        """The plan, if edges that are known back to version ``reached`` are enough for it.

        Args:
            reached: The oldest version whose edges are all known.
            is_last: Whether a way from nothing is enough, even if one from what is held may be
                cheaper.

        Raises:
            BrokenChainError: No older edge can be of use, and no way leads there.
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
        """The plan over all that is known.

        Raises:
            BrokenChainError: No way leads there.
        """
        return make_plan(self._held, self._version, self._edges.values(), encodings=self._encodings)
