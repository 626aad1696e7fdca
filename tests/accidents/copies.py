"""A store whose writes are kept, so that it can be put back to where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from deltachain.store import ObjectInfo, Store
from deltachain.store.base import MAX_DOCUMENT, Capabilities
from deltachain.types import Buffer, Version

Objects = dict[str, bytes]


class Journal:
    """Every write that was done to a chain, and how far they had come at each version."""

    def __init__(self) -> None:
        self.writes: list[tuple[str, bytes]] = []
        self.marks: dict[Version, int] = {}

    def copy(self) -> Journal:
        other = Journal()
        other.writes, other.marks = list(self.writes), dict(self.marks)
        return other

    def mark(self, version: Version) -> None:
        """So far at this version; nothing where that was marked already."""
        self.marks.setdefault(version, len(self.writes))

    def at(self, version: Version) -> Objects:
        """What was in the store when this was the newest version, or the one before it."""
        known = max((mark for mark in self.marks if mark <= version), default=-1)
        return dict(self.writes[: self.marks.get(known, 0)])

    @property
    def now(self) -> Objects:
        return dict(self.writes)


class Kept(Store):
    """Another store, whose writes go into a journal; some are lost behind a yes."""

    def __init__(self, inner: Store, journal: Journal) -> None:
        self.inner, self.journal = inner, journal
        self.loses: tuple[str, ...] = ()
        self.lost: list[str] = []
        self.interrupted: tuple[str, Callable[[], None]] | None = None

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @property
    def requests(self) -> int:
        return self.inner.requests

    def get(self, key: str, *, limit: int = MAX_DOCUMENT) -> bytes:
        return self.inner.get(key, limit=limit)

    def read(self, key: str, *, nbytes: int, pin: str = "") -> Buffer:
        return self.inner.read(key, nbytes=nbytes, pin=pin)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.inner.get_range(key, start, length)

    def put(self, key: str, data: Buffer) -> str:
        if self._loses(key):
            return ""
        named = self.inner.put(key, data)
        self.journal.writes.append((key, bytes(data)))
        return named

    def put_if_absent(self, key: str, data: Buffer) -> None:
        if not self._loses(key):
            self.inner.put_if_absent(key, data)
            self.journal.writes.append((key, bytes(data)))

    def find(self, key: str) -> ObjectInfo | None:
        return self.inner.find(key)

    def find_all(self, keys: Iterable[str]) -> Mapping[str, ObjectInfo]:
        return self.inner.find_all(keys)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def close(self) -> None:
        self.inner.close()

    def _loses(self, key: str) -> bool:
        if self.interrupted is not None and key.startswith(self.interrupted[0]):
            (_, happens), self.interrupted = self.interrupted, None
            happens()
        lost = any(key.startswith(prefix) for prefix in self.loses)
        if lost:
            self.lost.append(key)
        return lost
