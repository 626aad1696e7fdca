"""Objects in the memory of this process, for tests, examples and notebooks."""

import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from deltachain.store import base
from deltachain.types import Buffer


class MemoryStore(base.SimpleStore):
    """Objects in memory, visible to this process only and lost at its exit.

    A store created by the constructor is private to its creator. ``MemoryStore.named`` returns the
    store shared by all users of ``memory://name`` in this process; closing it keeps its objects.

    Raises:
        ConfigError: The name is not a valid key.
    """

    @property
    def capabilities(self) -> base.Capabilities:
        return base.Capabilities(conditional_put=True, list_consistent=True)

    _shared: Final["dict[str, MemoryStore]"] = {}
    _shared_lock: Final = threading.Lock()

    def __init__(self, name: str = "") -> None:
        self._name = base.check_key(name or f"anonymous-{secrets.token_hex(8)}")
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, float]] = {}

    @classmethod
    def named(cls, name: str) -> "MemoryStore":
        """Return the store of this name, the same for all callers in this process.

        Raises:
            ConfigError: The name is not a valid key.
        """
        with cls._shared_lock:
            if name not in cls._shared:
                cls._shared[base.check_key(name)] = cls(name)
            return cls._shared[name]

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def _read(self, key: str, choose: base.Choose) -> bytes:
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise base.not_found(key, self.url)
        start, length = choose(len(found[0]))
        return found[0][start : start + length]

    def put(self, key: str, data: Buffer) -> str:
        self._keep(key, data)
        return ""

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._keep(key, data, if_absent=True)

    def _keep(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        base.check_key(key)
        copied = bytes(base.bytes_view(data))
        with self._lock:
            if if_absent and key in self._objects:
                raise base.already_exists(key, self.url)
            self._objects[key] = (copied, time.time())

    def find(self, key: str) -> base.ObjectInfo | None:
        base.check_key(key)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            return None
        return base.ObjectInfo(key=key, nbytes=len(found[0]), modified=found[1])

    def list(self, prefix: str = "") -> Iterator[base.ObjectInfo]:
        base.check_prefix(prefix)
        with self._lock:
            found = sorted(
                (key, len(data), modified)
                for key, (data, modified) in self._objects.items()
                if key.startswith(prefix)
            )
        return (base.ObjectInfo(key=key, nbytes=nbytes, modified=at) for key, nbytes, at in found)

    def delete(self, key: str) -> None:
        base.check_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def clock(self) -> float:
        return time.time()


def open_memory(url: str, options: Mapping[str, Any], *, writer: bool) -> MemoryStore:  # noqa: ARG001
    parts = base.split_url(url, options)
    return MemoryStore.named(f"{parts.netloc}{parts.path}".rstrip("/"))
