"""Store of objects that have a size but need no content, which counts requests like S3."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from typing_extensions import override

from deltachain.store.base import (
    Capabilities,
    ObjectInfo,
    already_exists,
    bytes_view,
    check_key,
    check_prefix,
    not_found,
)
from deltachain.store.simple import Choose, SimpleStore
from deltachain.types import Buffer

PAGE: Final = 1000
"""Objects that one request lists."""


@dataclass(slots=True)
class Requests:
    """Requests as providers count them.

    Attributes:
        reads: Gets and heads.
        writes: Puts and lists, which cost the same; deletions are free.
        nbytes: Bytes of the objects that were read.
        in_row: Reads by the thread that created the store, which wait for one another.
    """

    reads: int = 0
    writes: int = 0
    nbytes: int = 0
    in_row: int = 0

    def __sub__(self, other: Requests) -> Requests:
        return Requests(
            self.reads - other.reads,
            self.writes - other.writes,
            self.nbytes - other.nbytes,
            self.in_row - other.in_row,
        )


@dataclass(slots=True)
class _Entry:
    nbytes: int
    modified: float
    content: bytes | None


class SizedStore(SimpleStore):
    """Objects in memory with the guarantees of S3: one key a request, conditional puts.

    Payloads that :meth:`put_sized` adds have no content; reading one raises ``ValueError``.

    Args:
        name: Name in its URL.

    Attributes:
        now: Time that new objects get, in seconds.
        counted: Requests so far.
        put_nbytes: Bytes that were put so far.
    """

    def __init__(self, name: str = "reach") -> None:
        self.now = 0.0
        self.counted = Requests()
        self.put_nbytes = 0
        self._name, self._thread = name, threading.get_ident()
        self._lock = threading.Lock()
        self._folders: defaultdict[str, dict[str, _Entry]] = defaultdict(dict)

    @property
    @override
    def url(self) -> str:
        return f"memory://{self._name}"

    @property
    @override
    def capabilities(self) -> Capabilities:
        return Capabilities(conditional_put=True, list_consistent=True)

    @property
    def nbytes(self) -> int:
        """Size of all objects, in bytes."""
        return sum(e.nbytes for entries in self._folders.values() for e in entries.values())

    def spent(self) -> Requests:
        """Return the requests so far."""
        return self.counted - Requests()

    def put_sized(self, key: str, nbytes: int) -> None:
        """Put an object of a size without content."""
        self._put(key, nbytes, None)

    @override
    def put(self, key: str, data: Buffer) -> str:
        copied = bytes(bytes_view(data))
        self._put(check_key(key), len(copied), copied)
        return ""

    @override
    def put_if_absent(self, key: str, data: Buffer) -> None:
        with self._lock:
            is_there = check_key(key) in self._folder(key)
        if is_there:
            self.counted.writes += 1
            raise already_exists(key, self.url)
        self.put(key, data)

    @override
    def find(self, key: str) -> ObjectInfo | None:
        with self._lock:
            self._read_one(0)
            found = self._folder(check_key(key)).get(key)
        if found is None:
            return None
        return ObjectInfo(key=key, nbytes=found.nbytes, modified=found.modified)

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        name, slash, _ = prefix.partition("/")
        with self._lock:
            folders = [self._folders[name]] if slash else list(self._folders.values())
            found = sorted(
                (key, entry.nbytes, entry.modified)
                for folder in folders
                for key, entry in folder.items()
                if key.startswith(prefix)
            )
            self.counted.writes += 1 + len(found) // PAGE
        return (ObjectInfo(key=key, nbytes=size, modified=at) for key, size, at in found)

    @override
    def delete(self, key: str) -> None:
        with self._lock:
            self._folder(check_key(key)).pop(key, None)

    @override
    def _read(self, key: str, choose: Choose) -> bytes:
        with self._lock:
            found = self._folder(key).get(key)
            self._read_one(0 if found is None else found.nbytes)
        if found is None:
            raise not_found(key, self.url)
        start, length = choose(found.nbytes)
        if found.content is None:
            raise ValueError(f"{key} has a size, but no content")
        return found.content[start : start + length]

    def _folder(self, key: str) -> dict[str, _Entry]:
        return self._folders[key.partition("/")[0]]

    def _put(self, key: str, nbytes: int, content: bytes | None) -> None:
        with self._lock:
            self._folder(key)[key] = _Entry(nbytes, self.now, content)
            self.counted.writes += 1
            self.put_nbytes += nbytes

    def _read_one(self, nbytes: int) -> None:
        self.counted.reads += 1
        self.counted.nbytes += nbytes
        self.counted.in_row += threading.get_ident() == self._thread
