"""Survey of a chain: every edge in its documents, and every payload object in its store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.checks import read_summary
from deltachain.errors import FormatError, ObjectNotFoundError
from deltachain.format.documents import EdgeSummary, PrunedRange, range_of
from deltachain.format.keys import EDGE_PREFIX, PAYLOADS, edge_of, version_of
from deltachain.maintain.keep import ranges
from deltachain.store import ObjectInfo
from deltachain.threads import Pool
from deltachain.types import Version

_Place: TypeAlias = tuple[str, Version]

READS: Final = 16
"""Documents read at a time."""


@dataclass(slots=True)
class Survey:
    """Edges of a chain, read once and kept from one round of maintenance to the next.

    Args:
        chain: The chain.

    Attributes:
        forgotten: Pruned edges that are kept as ranges only, so that memory does not grow with the
            chain; see :meth:`forget`.
    """

    chain: Chain
    forgotten: tuple[PrunedRange, ...] = field(default=(), init=False)
    _edges: dict[tuple[Version, str, Version | None], EdgeSummary] = field(default_factory=dict)
    _records: dict[str, tuple[ObjectInfo, EdgeSummary | None]] = field(default_factory=dict)
    _parts: dict[EdgeSummary, dict[str, int]] = field(default_factory=dict)
    _seen: Committed | None = None

    def edges(self, head: Committed) -> tuple[EdgeSummary, ...]:
        """Return all edges up to the head, by version; reads what is new since the last call.

        Edges that are forgotten are left out, and edge records that are damaged or that no trusted
        key signed. Reads everything again if the store has another history since the last call, as
        after it was restored from a backup.
        """
        if self._seen is not None and not self._descends(head, self._seen):
            self.recall()
            self._parts = {}  # of other manifests, though their summaries may be the same
        seen = -1 if self._seen is None else self._seen.version
        for committed in self.chain.windows(head):
            self._add((*committed.manifest.recent, committed.manifest.summary()))
            if committed.manifest.window_from <= seen:
                break
        self._seen = head
        listed = self.chain.store.list(EDGE_PREFIX)
        there = {info.key: info for info in listed if not self._is_forgotten(info.key)}
        self._drop({key for key, (info, _) in self._records.items() if there.get(key) != info})
        known = {key for key, (_, summary) in self._records.items() if summary is not None}
        new = [info for key, info in there.items() if key not in known]
        with Pool(READS) as pool:
            read = pool.map(lambda info: (info, self._read(info.key)), new)
            self._records |= {info.key: (info, summary) for info, summary in read}
        self._add(summary for _, summary in self._records.values() if summary is not None)
        edges = (edge for edge in self._edges.values() if edge.version <= head.version)
        return tuple(sorted(edges, key=lambda edge: (edge.version, edge.kind, edge.base or 0)))

    def forget(self, edges: Collection[EdgeSummary], time: float) -> None:
        """Keep edges as ranges only.

        Args:
            edges: Pruned edges whose time has come, and without an object where their parts were.
            time: Time of the store, in seconds since 1970.
        """
        gone = set(edges)
        if not gone:
            return
        after = dict.fromkeys(gone, time)
        self.forgotten = ranges(self._edges.values(), after, time, self.forgotten)
        self._edges = {place: edge for place, edge in self._edges.items() if edge not in gone}
        for edge in gone:
            self._records.pop(edge.record, None)

    def must_recall(self, edges: Iterable[EdgeSummary], objects: Mapping[str, ObjectInfo]) -> bool:
        """Return whether edges that are forgotten are needed again.

        Args:
            edges: Edges that stay.
            objects: Payload objects, by key.
        """
        if not self.forgotten:
            return False
        return any(self._covers(edge) for edge in edges) or self._came_back(by_version(objects))

    def _came_back(self, there: Mapping[_Place, Iterable[ObjectInfo]]) -> bool:
        """Return whether there are objects of forgotten edges, or of unknown ones in their place.

        Leaves out objects that an unreadable record may name: others decide about them.
        """
        rows: dict[str, list[PrunedRange]] = defaultdict(list)
        for row in self.forgotten:
            rows[f"{row.kind}s"].append(row)
        places = {
            place
            for place in there.keys() - self.unreadable()
            for row in rows[place[0]]
            if row.first <= place[1] <= row.last and place[1] % max(row.span, 1) == 0
        }
        known: dict[_Place, set[str] | None] = {place: set() for place in places}
        others = [edge for edge in self._edges.values() if _place(edge) in places]
        for edge, parts in self.parts_of(others).items():
            keys = known[_place(edge)]
            known[_place(edge)] = None if parts is None or keys is None else keys | parts.keys()
        return any(
            info.key not in keys
            for place, keys in known.items()
            if keys is not None
            for info in there[place]
        )

    def recall(self) -> None:
        """Forget nothing any more: the next call reads all edges again."""
        self.forgotten, self._seen = (), None
        self._edges, self._records = {}, {}

    def has_record(self, key: str) -> bool:
        """Return whether an edge has a record, which may be damaged or forgotten."""
        return key in self._records or self._is_forgotten(key)

    def _descends(self, head: Committed, seen: Committed) -> bool:
        """Return whether a version that was the head is the same one still."""
        found = head if head.version == seen.version else self.chain.find(seen.version)
        return found is not None and found.digest == seen.digest

    def _covers(self, edge: EdgeSummary) -> bool:
        return range_of(self.forgotten, edge.kind, edge.base, edge.version) is not None

    def _is_forgotten(self, key: str) -> bool:
        place = edge_of(key) if self.forgotten else None
        return place is not None and range_of(self.forgotten, *place) is not None

    def _drop(self, keys: Set[str]) -> None:
        """Leave out records that are gone or were replaced."""
        for key in keys:
            del self._records[key]
        self._edges = {
            place: edge for place, edge in self._edges.items() if edge.record not in keys
        }

    def unreadable(self) -> frozenset[tuple[str, Version]]:
        """Return folder and version of the parts that unreadable edge records may name.

        A record is unreadable if it is damaged, or if no trusted key signed it.
        """
        keys = [key for key, (_, summary) in self._records.items() if summary is None]
        kinds = (key.rpartition("/")[2].partition("-")[0] for key in keys)
        return frozenset(
            (f"{kind}s", version_of(key) or 0) for kind, key in zip(kinds, keys, strict=True)
        )

    def objects(self) -> dict[str, ObjectInfo]:
        """List all payload objects, by key."""
        infos = (info for prefix in PAYLOADS for info in self.chain.store.list(prefix))
        found = {info.key: info for info in infos}
        there = by_version(found).keys()  # what is deleted does not come back: it is forgotten
        self._parts = {edge: n for edge, n in self._parts.items() if _place(edge) in there}
        return found

    def lost(self, edges: Iterable[EdgeSummary]) -> tuple[EdgeSummary, ...]:
        """Return the edges with fewer objects in the store than they have parts.

        No document is read: where several edges share a folder, a lost one may be overlooked.
        """
        listed = tuple(edges)
        there = frozenset(with_objects(listed, self.objects()))
        return tuple(edge for edge in listed if edge not in there)

    def parts_of(self, edges: Iterable[EdgeSummary]) -> dict[EdgeSummary, dict[str, int] | None]:
        """Return size by key of the parts of edges; each document is read once.

        The value is ``None`` if the document of an edge is gone or damaged.
        """
        wanted = list(edges)
        new = [edge for edge in wanted if edge not in self._parts]
        with Pool(READS) as pool:
            found = dict(zip(new, pool.map(self._read_parts, new), strict=True))
        self._parts |= {edge: parts for edge, parts in found.items() if parts is not None}
        return {edge: self._parts.get(edge) for edge in wanted}

    def _read_parts(self, edge: EdgeSummary) -> dict[str, int] | None:
        if not edge.parts:
            return {}
        try:
            found = self.chain.edge(edge)
        except (ObjectNotFoundError, FormatError):
            return None
        return {part.key: part.nbytes for part in found.parts}

    def _add(self, edges: Iterable[EdgeSummary]) -> None:
        for edge in edges:
            if not self._covers(edge):
                self._edges[edge.version, edge.record, edge.base] = edge

    def _read(self, key: str) -> EdgeSummary | None:
        chain = self.chain
        return read_summary(chain.store, key, chain=chain.identity.chain, trust=chain.trust)


def _place(edge: EdgeSummary) -> _Place:
    return f"{edge.kind}s", edge.version


def by_version(objects: Mapping[str, ObjectInfo]) -> dict[_Place, list[ObjectInfo]]:
    """Group payload objects by folder and version."""
    found: dict[_Place, list[ObjectInfo]] = defaultdict(list)
    for key, info in objects.items():
        version = version_of(key)
        if version is not None:
            found[key.partition("/")[0], version].append(info)
    return found


def with_objects(
    edges: Iterable[EdgeSummary], objects: Mapping[str, ObjectInfo]
) -> tuple[EdgeSummary, ...]:
    """Return the edges with as many objects as they have parts, or more, where these would be."""
    there = by_version(objects)
    return tuple(edge for edge in edges if len(there.get(_place(edge), ())) >= edge.parts)


def without_objects(
    edges: Iterable[EdgeSummary], objects: Mapping[str, ObjectInfo]
) -> tuple[EdgeSummary, ...]:
    """Return the edges without any object where their parts would be."""
    there = by_version(objects)
    return tuple(edge for edge in edges if _place(edge) not in there)
