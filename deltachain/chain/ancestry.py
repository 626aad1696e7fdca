"""Backward search through manifests: plans for a version, and versions of a state."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from deltachain import errors
from deltachain.chain.checks import read_document, read_summary
from deltachain.chain.manifests import NONE, Committed, Manifests, newest_number, read_hint
from deltachain.chain.plan import (
    ANCHORS_LISTED,
    Plan,
    edge_id,
    least_from_before,
    make_plan,
    window_from,
    windows_before,
)
from deltachain.chain.trust import Trust
from deltachain.format.documents import EdgeSummary, Manifest, PruneRecord
from deltachain.format.keys import edge_key, prune_key
from deltachain.store import Store
from deltachain.threads import Pool
from deltachain.types import StateDigest, Version


class Prunes:
    """The prune records of one chain, numbered from 0 without gaps."""

    def __init__(self, store: Store, chain: str, trust: Trust) -> None:
        self._store = store
        self._chain = chain
        self._trust = trust
        self._newest: PruneRecord | None = None

    def newest(self) -> PruneRecord | None:
        """Read the newest record; ``None`` before the first.

        Takes a logarithmic number of lookups the first time, and one while there is no newer one.
        """
        known = self._newest.number if self._newest else NONE
        number = newest_number(self._store, prune_key, known=known)
        if number > known:
            self._newest = self.read(number)
        return self._newest

    def newest_there(self) -> PruneRecord | None:
        if self._newest is not None:
            try:
                self._newest = self.read(self._newest.number)
            except errors.ObjectNotFoundError:
                self._newest = None
        return self.newest()

    def read(self, number: int) -> PruneRecord:
        """Read a record; once more if it is damaged."""
        key = prune_key(number)
        kind, chain = PruneRecord, self._chain
        record, _ = read_document(self._store, key, kind, chain=chain, trust=self._trust)
        if record.number != number:
            raise errors.MalformedError(f"{key}: is prune record {record.number}", key=key)
        return record

    @property
    def names_edges(self) -> bool:
        return self._newest is not None and bool(self._newest.pruned)

    def is_pruned(self, edge: EdgeSummary) -> bool:
        return self._newest is not None and self._newest.covers(edge)

    def names(self, kind: str, base: Version | None, version: Version) -> bool:
        """Return whether the newest record that was read names an edge, which need not exist."""
        newest = self._newest
        return newest is not None and newest.range_of(kind, base, version) is not None

    def is_closed(self, version: Version) -> bool:
        """Return whether the newest record that was read closes a version to further edges."""
        return self._newest is not None and self._newest.closes(version)

    def refresh(self, *, there: bool = False) -> None:
        """Read the newest record, if it is readable: planning does without it."""
        try:
            self.newest_there() if there else self.newest()
        except (errors.FormatError, errors.ObjectNotFoundError):
            return


# A skip leads to a version that its *span* divides, from the version that much older. Their records
# therefore have computed keys: a reader that is far behind neither lists nor reads every manifest.


SPANS: Final = (512, 64, 8)
"""Versions between base and version of a skip, largest first. With eight edges of the next smaller
kind in each, a way over N versions takes at most 42 edges and one for each 512 versions."""

ANCHOR_AT: Final = 64
"""Anchors of maintainers lead to versions that this number divides, where few skips lead on."""

READS: Final = 16  # documents read at a time
MOST_LISTS: Final = 128
"""Manifests read for deltas where skips are missing; if it takes more, these are left out."""


class Hop(NamedTuple):
    """A skip, or a delta, on the way from one version to another."""

    base: Version
    version: Version

    @property
    def span(self) -> int:
        return self.version - self.base

    @property
    def key(self) -> str:
        return edge_key(self.version, "skip", self.base)

    def finer(self) -> "list[Hop]":
        """Return the hops of the next smaller span that replace this one."""
        step = next((span for span in SPANS if span < self.span), 1)
        return [Hop(at, at + step) for at in range(self.base, self.version, step)]


def hops(first: Version, last: Version) -> list[Hop]:
    """Return the way from one version to another over the largest skips."""
    way = []
    while first < last:
        step = next((s for s in SPANS if first % s == 0 and first + s <= last), 1)
        way.append(Hop(first, first + step))
        first += step
    return way


def _windows(versions: Sequence[Version]) -> list[Version]:
    """Return versions whose manifests list the edges to all of ``versions``, newest first."""
    chosen: list[Version] = []
    for version in reversed(versions):
        if not chosen or version < window_from(chosen[-1], is_short=True):
            chosen.append(version)
    return chosen


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
    """The history of a chain, read from the edge lists of few manifests, and from skips."""

    def __init__(
        self, store: Store, manifests: Manifests, prunes: Prunes, chain: str, trust: Trust
    ) -> None:
        self._store = store
        self._manifests = manifests
        self._prunes = prunes
        self._chain = chain
        self._trust = trust

    def find_state(self, state: StateDigest, head: Committed | None) -> Committed | None:
        """Find the newest version with a state, among recent versions and version 0.

        The search ends where a plan from nothing would stop reading.
        """
        if head is None:
            return None
        edges = (*head.manifest.recent, head.manifest.summary())
        start = max((edge.version for edge in edges if edge.base is None), default=None)
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
        """
        version = target.version
        later = None
        with suppress(errors.SignatureError):  # nobody needs the next version
            later = self._manifests.find(version + 1)  # lists an anchor of this version
        hinted = [edge for edge in read_hint(self._store).anchors if edge.version <= version]
        search = _Search(held, version, encodings, avoid)
        search.add([*hinted, *(later.manifest.recent if later else ())])
        search.add((*target.manifest.recent, target.manifest.summary()))
        if later is not None and not pruned:
            self._leave_out_pruned(search)
        plan = None
        with suppress(errors.BrokenChainError):  # edges of the window may be pruned
            plan = search.plan(target.manifest.window_from, is_last=False)
        if plan is None:
            if not pruned:
                self._leave_out_pruned(search)
            without = None if pruned or not self._prunes.names_edges else self._prunes.is_pruned
            if search.add(self._edges(search.starts, version, without=without)):
                with suppress(errors.BrokenChainError):
                    plan = search.end()
        if plan is not None:
            return plan
        try:
            return self._plan_far(held, target, search)
        except errors.BrokenChainError as exc:
            if not pruned and self._prunes.is_pruned(target.manifest.summary()):
                message = f"{exc.args[0]}: its payloads were pruned"
                raise errors.BrokenChainError(message, version=target.version, hint=PRUNED) from exc
            raise

    def _leave_out_pruned(self, search: "_Search") -> None:
        self._prunes.refresh()
        search.leave_out(self._prunes.is_pruned)

    def _plan_far(self, held: Version | None, target: Committed, search: "_Search") -> Plan:
        """Find a plan over older manifests, else one over anchors that none of them lists."""
        try:
            return self._plan_back(held, target, search)
        except errors.BrokenChainError:
            if search.add(self._anchors(target.version)):
                with suppress(errors.BrokenChainError):
                    return search.end()
            raise

    def _plan_back(self, held: Version | None, target: Committed, search: "_Search") -> Plan:
        """Find the cheapest plan by reading manifests backward."""
        manifest = target.manifest
        for count, committed in enumerate(self.windows(target, PLAN_WINDOWS), 1):
            manifest = committed.manifest
            search.add((*manifest.recent, manifest.summary()))
            plan = search.plan(manifest.window_from, is_last=count >= PLAN_WINDOWS)
            if plan is not None:
                return plan
        try:
            return search.end()
        except errors.BrokenChainError as exc:
            if held is None or held >= manifest.version or exc.hint != exc.default_hint:
                raise
            raise missing_manifest(
                manifest.version - 1, target.version
            ) from exc  # the search ended at a gap

    def windows(self, newest: Committed, expected: int) -> Iterator[Committed]:
        """Yield manifests whose windows together cover the history, newest first.

        A missing manifest is replaced by a near one. Ends at version 0, or at a gap that is wider
        than a window.
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

    def _edges(
        self,
        starts: Iterable[Version],
        last: Version,
        *,
        without: Callable[[EdgeSummary], bool] | None = None,
    ) -> tuple[EdgeSummary, ...]:
        """Find edges that lead from some versions to a later one in few steps."""
        way = {hop for first in starts for hop in hops(first, last)}
        wanted = sorted(hop for hop in way if hop.span > 1)
        deltas = sorted(hop for hop in way if hop.span == 1)
        found: dict[Hop, EdgeSummary] = {}
        with Pool(READS) as pool:
            while wanted:
                there = self._there(wanted)
                read = zip(there, pool.map(self._read, there), strict=True)
                found |= {
                    hop: summary
                    for hop, summary in read
                    if summary is not None and not (without and without(summary))
                }
                if not found and without is None:
                    return ()
                finer = [part for hop in wanted if hop not in found for part in hop.finer()]
                wanted = [hop for hop in finer if hop.span > 1]
                deltas += [hop for hop in finer if hop.span == 1]
            versions = _windows(sorted({hop.version for hop in deltas}))
            lists = list(pool.map(self._listed, versions[:MOST_LISTS]))
        return (*found.values(), *(edge for edges in lists for edge in edges))

    def _anchors(self, version: Version) -> tuple[EdgeSummary, ...]:
        """Find the anchors of a version, and of the last one where maintainers add them, by key.

        They need not be listed: manifests and the head hint list the two newest anchors only.
        """
        places = {version, version - version % ANCHOR_AT}
        keys = [edge_key(place, "anchor", None) for place in sorted(places)]
        found = (read_summary(self._store, k, chain=self._chain, trust=self._trust) for k in keys)
        return tuple(summary for summary in found if summary is not None)

    def _there(self, wanted: Sequence[Hop]) -> list[Hop]:
        """Return the hops that may have a record, after one lookup where that covers many."""
        if self._store.capabilities.probes == 1:
            return list(wanted)
        infos = self._store.find_all([hop.key for hop in wanted])
        return [hop for hop in wanted if hop.key in infos]

    def _read(self, hop: Hop) -> EdgeSummary | None:
        return read_summary(self._store, hop.key, chain=self._chain, trust=self._trust)

    def _listed(self, version: Version) -> tuple[EdgeSummary, ...]:
        try:
            found = self._manifests.find(version)
        except errors.FormatError:
            return ()
        return (*found.manifest.recent, found.manifest.summary()) if found else ()


def missing_manifest(version: Version, newest: Version) -> errors.BrokenChainError:
    return errors.BrokenChainError(
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
        anchors = sorted({edge.version for edge in self._edges.values() if edge.base is None})
        held = () if self._held is None or self._held > self._version else (self._held,)
        return (*held, *anchors[-ANCHORS_LISTED:])

    def leave_out(self, unwanted: Callable[[EdgeSummary], bool]) -> None:
        self._left_out = unwanted
        known, self._edges, self._start = tuple(self._edges.values()), {}, -1
        self.add(known)

    def add(self, edges: Iterable[EdgeSummary]) -> bool:
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
        """Return the cheapest plan if the edges back to version ``reached`` determine it."""
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
        except errors.BrokenChainError:
            return None
        return plan if from_held or held is None or plan.cost <= least or is_last else None

    def end(self) -> Plan:
        return make_plan(self._held, self._version, self._edges.values(), encodings=self._encodings)
