"""Backward search through manifests: plans for a version, and versions of a state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import Final

from deltachain.chain.head_hint import read_hint
from deltachain.chain.log import Committed, Manifests
from deltachain.chain.plan import Plan, least_from_before, make_plan
from deltachain.chain.prunes import Prunes
from deltachain.chain.recent_edges import ANCHORS_LISTED, edge_id, newest_start, windows_before
from deltachain.chain.skips import Skips
from deltachain.errors import BrokenChainError, SignatureError
from deltachain.format.documents import EdgeSummary, Manifest
from deltachain.store import Store
from deltachain.types import StateDigest, Version

STATE_WINDOWS: Final = 8
"""Windows searched for a state. A target with older, unidentified bits starts from nothing, which
costs less than reading a long history."""

PLAN_WINDOWS: Final = 24
"""Windows read for a plan from the held version when a plan from nothing is known."""

PRUNED: Final = (
    "pruned payloads do not come back: choose a version that was kept (`deltachain verify` lists "
    "them), and tag those that you may want again"
)
"""Hint for a version that no plan leads to, because of a prune."""


class Past:
    """The history of a chain, read from the edge lists of few manifests.

    Args:
        store: Store of the chain.
        manifests: Manifests of the chain.
        prunes: Prune records of the chain.
        skips: Skips of the chain.
    """

    def __init__(self, store: Store, manifests: Manifests, prunes: Prunes, skips: Skips) -> None:
        self._store = store
        self._manifests = manifests
        self._prunes = prunes
        self._skips = skips

    def find_state(self, state: StateDigest, head: Committed | None) -> Committed | None:
        """Find the newest version with a state, among recent versions and version 0.

        The search ends where a plan from nothing would stop reading.
        """
        if head is None:
            return None
        start = newest_start((*head.manifest.recent, head.manifest.summary()))
        for count, committed in enumerate(self.windows(head, STATE_WINDOWS), 1):
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
        pruned: bool = False,
    ) -> Plan:
        """Find the cheapest plan from ``held`` to a committed version; see :func:`plan.make_plan`.

        Edges beyond the first window are looked up by their keys, if the chain has skips.
        Otherwise, reads older manifests until none can yield a cheaper plan, at most
        ``PLAN_WINDOWS``; where there is no plan, anchors are looked up by their keys too. Pruned
        edges are left out, unless ``pruned`` is set; edges that the newest manifest lists never are
        pruned (FORMAT.md 5), so that a plan to the head that needs no others saves the lookup.

        Raises:
            BrokenChainError: No plan exists.
        """
        version = target.version
        later = None
        with suppress(SignatureError):  # nobody needs the next version
            later = self._manifests.find(version + 1)  # lists an anchor of this version
        hinted = [edge for edge in read_hint(self._store).anchors if edge.version <= version]
        search = _Search(held, version, encodings, avoid)
        search.add([*hinted, *(later.manifest.recent if later else ())])
        search.add((*target.manifest.recent, target.manifest.summary()))
        if later is not None and not pruned:
            self._leave_out_pruned(search)
        plan = None
        with suppress(BrokenChainError):  # edges of the window may be pruned
            plan = search.plan(target.manifest.window_from, is_last=False)
        if plan is None:
            if not pruned:
                self._leave_out_pruned(search)
            without = None if pruned or not self._prunes.names_edges else self._prunes.is_pruned
            if search.add(self._skips.edges(search.starts, version, without=without)):
                with suppress(BrokenChainError):
                    plan = search.end()
        if plan is not None:
            return plan
        try:
            return self._plan_far(held, target, search)
        except BrokenChainError as exc:
            if not pruned and self._prunes.is_pruned(target.manifest.summary()):
                message = f"{exc.args[0]}: its payloads were pruned"
                raise BrokenChainError(message, version=target.version, hint=PRUNED) from exc
            raise

    def _leave_out_pruned(self, search: _Search) -> None:
        self._prunes.refresh()
        search.leave_out(self._prunes.is_pruned)

    def _plan_far(self, held: Version | None, target: Committed, search: _Search) -> Plan:
        """Find a plan over older manifests, else one over anchors that none of them lists.

        Raises:
            BrokenChainError: No plan exists.
        """
        try:
            return self._plan_back(held, target, search)
        except BrokenChainError:
            if search.add(self._skips.anchors(target.version)):
                with suppress(BrokenChainError):
                    return search.end()
            raise

    def _plan_back(self, held: Version | None, target: Committed, search: _Search) -> Plan:
        """Find the cheapest plan by reading manifests backward.

        Raises:
            BrokenChainError: No plan exists.
        """
        manifest = target.manifest
        for count, committed in enumerate(self.windows(target, PLAN_WINDOWS), 1):
            manifest = committed.manifest
            search.add((*manifest.recent, manifest.summary()))
            plan = search.plan(manifest.window_from, is_last=count >= PLAN_WINDOWS)
            if plan is not None:
                return plan
        try:
            return search.end()
        except BrokenChainError as exc:
            if held is None or held >= manifest.version or exc.hint != exc.default_hint:
                raise
            raise _missing(
                manifest.version - 1, target.version
            ) from exc  # the search ended at a gap

    def windows(self, newest: Committed, expected: int) -> Iterator[Committed]:
        """Yield manifests whose windows together cover the history, newest first.

        A missing manifest is replaced by a near one. Ends at version 0, or at a gap that is wider
        than a window.

        Args:
            newest: The first manifest.
            expected: Number of manifests to prefetch.
        """
        yield newest
        first = newest.manifest.window_from
        self._manifests.looks.ahead(windows_before(first, expected))
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


def _missing(version: Version, newest: Version) -> BrokenChainError:
    return BrokenChainError(
        f"manifest of version {version} is missing, although version {newest} exists",
        version=version,
        hint="manifests must never be deleted: restore it, or publish an anchor that avoids it",
    )


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
        self._left_out: Callable[[EdgeSummary], bool] = lambda _: False
        self._edges: dict[tuple[int, str, int, str], EdgeSummary] = {}
        self._start: Version = -1

    @property
    def starts(self) -> tuple[Version, ...]:
        """The version held, and the newest versions that an edge from nothing leads to."""
        anchors = sorted({edge.version for edge in self._edges.values() if edge.base is None})
        held = () if self._held is None or self._held > self._version else (self._held,)
        return (*held, *anchors[-ANCHORS_LISTED:])

    def leave_out(self, unwanted: Callable[[EdgeSummary], bool]) -> None:
        """Remove edges, and ignore such edges from now on."""
        self._left_out = unwanted
        known, self._edges, self._start = tuple(self._edges.values()), {}, -1
        self.add(known)

    def add(self, edges: Iterable[EdgeSummary]) -> bool:
        """Add the usable ones of ``edges``; return whether there are any."""
        added = False
        for edge in edges:
            wanted = edge not in self._avoid and not self._left_out(edge)
            if edge.version <= self._version and wanted:
                added = True
                self._edges[edge_id(edge)] = edge
                if edge.base is None:
                    self._start = max(self._start, edge.version)
        return added

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
