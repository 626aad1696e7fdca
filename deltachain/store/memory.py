"""Objects in the memory of this process: the twin for tests, examples and notebooks."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from deltachain.errors import AlreadyExistsError
from deltachain.store.base import (
    MAX_DOCUMENT,
    Capabilities,
    ObjectInfo,
    bytes_view,
    check_key,
    check_limit,
    check_nbytes,
    check_prefix,
    check_range,
    find_each,
    not_found,
    too_short,
)
from deltachain.types import Buffer

_CAPABILITIES: Final = Capabilities(conditional_put=True, list_consistent=True)


class MemoryStore:
    """Objects that live as long as this process, seen by its threads alone.

    A store made here belongs to who made it. ``MemoryStore.named`` is the one that everybody who
    opens ``memory://name`` in this process shares; closing it keeps its objects.

    Raises:
        ConfigError: The name is not one that a key could be.
    """

    _shared: Final[dict[str, MemoryStore]] = {}
    _shared_lock: Final = threading.Lock()

    def __init__(self, name: str = "") -> None:
        self._name = check_key(name or f"anonymous-{secrets.token_hex(8)}")
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, float]] = {}

    @classmethod
    def named(cls, name: str) -> MemoryStore:
        """Return the store of this name, the same one to every caller in this process.

        Raises:
            ConfigError: The name is not one that a key could be.
        """
        with cls._shared_lock:
            if name not in cls._shared:
                cls._shared[check_key(name)] = cls(name)
            return cls._shared[name]

    @property
    def url(self) -> str:
        """``memory://`` and the name."""
        return f"memory://{self._name}"

    @property
    def capabilities(self) -> Capabilities:
        """Everything."""
        return _CAPABILITIES

    @property
    def requests(self) -> int:
        """None."""
        return 0

    def get(self, key: str, *, limit: int = MAX_DOCUMENT) -> bytes:
        """Read a whole small object; see ``Store``."""
        data = self._get(key)
        check_limit(key, self.url, nbytes=len(data), limit=limit)
        return data

    def read(self, key: str, *, nbytes: int, xet_hash: str = "") -> bytes:  # noqa: ARG002
        """Read a whole object of known size; see ``Store``."""
        check_range(0, nbytes)
        data = self._get(key)
        check_nbytes(key, self.url, expected=nbytes, actual=len(data))
        return data

    def _get(self, key: str) -> bytes:
        check_key(key)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise not_found(key, self.url)
        return found[0]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read exactly ``length`` bytes of an object; see ``Store``."""
        check_range(start, length)
        data = self._get(key)
        if start + length > len(data):
            raise too_short(key, self.url, nbytes=len(data), end=start + length)
        return data[start : start + length]

    def put(self, key: str, data: Buffer) -> str:
        """Write an object, in place of any other; see ``Store``."""
        check_key(key)
        copied = bytes(bytes_view(data))
        with self._lock:
            self._objects[key] = (copied, time.time())
        return ""

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Write an object under a key that has none; see ``Store``."""
        check_key(key)
        copied = bytes(bytes_view(data))
        with self._lock:
            if key in self._objects:
                raise AlreadyExistsError(
                    f"{self.url} already has an object {key!r}", key=key, url=self.url
                )
            self._objects[key] = (copied, time.time())

    def find(self, key: str) -> ObjectInfo | None:
        """Look an object up without reading it; see ``Store``."""
        check_key(key)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            return None
        return ObjectInfo(key=key, nbytes=len(found[0]), modified=found[1])

    def find_all(self, keys: Iterable[str]) -> Mapping[str, ObjectInfo]:
        """Look several objects up; see ``Store``."""
        return find_each(self, keys)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key begins with ``prefix``, in order; see ``Store``."""
        check_prefix(prefix)
        with self._lock:
            found = sorted(
                (key, len(data), modified)
                for key, (data, modified) in self._objects.items()
                if key.startswith(prefix)
            )
        return (ObjectInfo(key=key, nbytes=nbytes, modified=at) for key, nbytes, at in found)

    def delete(self, key: str) -> None:
        """Remove an object if there is one; see ``Store``."""
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def close(self) -> None:
        """Do nothing: others may hold this store."""
