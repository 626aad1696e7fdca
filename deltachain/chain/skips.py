"""Skips: edges over many versions, found by their keys.

A skip leads to a version that its *span* divides, from the version that much older. Their records
therefore have computed keys: a reader that is far behind neither lists nor reads every manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from deltachain.chain.edge_record import read_summary
from deltachain.chain.log import Manifests
from deltachain.chain.recent_edges import window_from
from deltachain.chain.trust import Trust
from deltachain.errors import FormatError
from deltachain.format.documents import EdgeSummary
from deltachain.format.keys import edge_key
from deltachain.store import Store
from deltachain.threads import Pool
from deltachain.types import Version

SPANS: Final = (512, 64, 8)
"""Versions between base and version of a skip, largest first. With eight edges of the next smaller
kind in each, a way over N versions takes at most 42 edges and one for each 512 versions."""

ANCHOR_AT: Final = 64
"""Anchors of maintainers lead to versions that this number divides, where few skips lead on."""

READS: Final = 16
"""Documents read at a time."""

MOST_LISTS: Final = 128
"""Manifests read for deltas where skips are missing; if it takes more, these are left out."""


class Hop(NamedTuple):
    """A skip, or a delta, on the way from one version to another."""

    base: Version
    version: Version

    @property
    def span(self) -> int:
        """Number of versions from base to version."""
        return self.version - self.base

    @property
    def key(self) -> str:
        """Key of the edge record of a skip."""
        return edge_key(self.version, "skip", self.base)

    def finer(self) -> list[Hop]:
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


class Skips:
    """The skips of one chain, and the deltas where there are none.

    Args:
        store: Store of the chain.
        manifests: Manifests of the chain.
        chain: Id of the chain.
        trust: Keys that sign and check records.
    """

    def __init__(self, store: Store, manifests: Manifests, chain: str, trust: Trust) -> None:
        self._store = store
        self._manifests = manifests
        self._chain = chain
        self._trust = trust

    def edges(
        self,
        starts: Iterable[Version],
        last: Version,
        *,
        without: Callable[[EdgeSummary], bool] | None = None,
    ) -> tuple[EdgeSummary, ...]:
        """Find edges that lead from some versions to a later one in few steps.

        Args:
            starts: Versions to start from.
            last: The version to reach.
            without: Whether a skip is pruned, so that smaller ones replace it; ``None`` where
                nothing is pruned.

        Returns:
            Skips and deltas; nothing if nothing is pruned and there is no skip at all on the
            largest scale, since deltas lead on then.
        """
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

    def anchors(self, version: Version) -> tuple[EdgeSummary, ...]:
        """Find the anchors of a version, and of the last one where maintainers add them, by key.

        They need not be listed: manifests and the head hint list the two newest anchors only.

        Args:
            version: The version to reach.
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
        """Return the edges that a manifest lists, and its own."""
        try:
            found = self._manifests.find(version)
        except FormatError:
            return ()
        return (*found.manifest.recent, found.manifest.summary()) if found else ()


def _windows(versions: Sequence[Version]) -> list[Version]:
    """Return versions whose manifests list the edges to all of ``versions``, newest first.

    Args:
        versions: Versions in ascending order.
    """
    chosen: list[Version] = []
    for version in reversed(versions):
        if not chosen or version < window_from(chosen[-1], is_short=True):
            chosen.append(version)
    return chosen
