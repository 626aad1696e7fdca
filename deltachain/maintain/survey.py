"""Survey of a chain: every edge in its documents, and every payload object in its store."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.checks import read_summary
from deltachain.errors import FormatError, ObjectNotFoundError
from deltachain.format.documents import EdgeSummary
from deltachain.format.keys import EDGE_PREFIX, PAYLOADS, version_of
from deltachain.store import ObjectInfo
from deltachain.threads import Pool
from deltachain.types import Version

_Place: TypeAlias = tuple[str, Version]

READS: Final = 16  # documents read at a time


@dataclass(slots=True)
class Survey:
    """Edges of a chain, read once and kept from one round of maintenance to the next."""

    chain: Chain
    _edges: dict[tuple[Version, str, Version | None], EdgeSummary] = field(default_factory=dict)
    _records: dict[str, tuple[ObjectInfo, EdgeSummary | None]] = field(default_factory=dict)
    _parts: dict[EdgeSummary, dict[str, int]] = field(default_factory=dict)
    _seen: Committed | None = None

    def edges(self, head: Committed) -> tuple[EdgeSummary, ...]:
        """Return all edges up to the head, by version; reads what is new since the last call.

        Edge records that are damaged or that no trusted key signed are left out. Reads everything
        again if the store has another history since the last call, as after it was restored from a
        backup.
        """
        if self._seen is not None and not self._descends(head, self._seen):
            self._seen, self._edges, self._records, self._parts = None, {}, {}, {}
        seen = -1 if self._seen is None else self._seen.version
        for committed in self.chain.windows(head):
            self._add((*committed.manifest.recent, committed.manifest.summary()))
            if committed.manifest.window_from <= seen:
                break
        self._seen = head
        there = {info.key: info for info in self.chain.store.list(EDGE_PREFIX)}
        self._drop({key for key, (info, _) in self._records.items() if there.get(key) != info})
        known = {key for key, (_, summary) in self._records.items() if summary is not None}
        new = [info for key, info in there.items() if key not in known]
        with Pool(READS) as pool:
            read = pool.map(lambda info: (info, self._read(info.key)), new)
            self._records |= {info.key: (info, summary) for info, summary in read}
        self._add(summary for _, summary in self._records.values() if summary is not None)
        edges = (edge for edge in self._edges.values() if edge.version <= head.version)
        return tuple(sorted(edges, key=lambda edge: (edge.version, edge.kind, edge.base or 0)))

    def has_record(self, key: str) -> bool:
        return key in self._records

    def _descends(self, head: Committed, seen: Committed) -> bool:
        found = head if head.version == seen.version else self.chain.find(seen.version)
        return found is not None and found.digest == seen.digest

    def _drop(self, keys: Set[str]) -> None:
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
        infos = (info for prefix in PAYLOADS for info in self.chain.store.list(prefix))
        found = {info.key: info for info in infos}
        there = by_version(found).keys()  # of what is deleted, no part is asked for again
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
            self._edges[edge.version, edge.record, edge.base] = edge

    def _read(self, key: str) -> EdgeSummary | None:
        chain = self.chain
        return read_summary(chain.store, key, chain=chain.identity.chain, trust=chain.trust)


def _place(edge: EdgeSummary) -> _Place:
    return f"{edge.kind}s", edge.version


def by_version(objects: Mapping[str, ObjectInfo]) -> dict[_Place, list[ObjectInfo]]:
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
