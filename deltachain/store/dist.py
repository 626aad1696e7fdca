"""Objects in the memory of the ranks of one ``torch.distributed`` job: ``dist://name``.

For trainers and followers in one job, without an object store between them. Small objects are kept
in the job's key-value store; large ones stay on the rank that put them, which sends them to other
ranks on request, over a separate process group (gloo, from host memory). All objects are lost when
the job ends.
"""

from __future__ import annotations

import atexit
import itertools
import struct
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from typing_extensions import override

from deltachain.errors import (
    ConfigError,
    ObjectNotFoundError,
    StoreUnavailableError,
)
from deltachain.store.base import (
    Capabilities,
    ObjectInfo,
    already_exists,
    bytes_view,
    check_key,
    check_prefix,
    not_found,
    split_url,
)
from deltachain.store.simple import Choose, SimpleStore
from deltachain.types import Buffer

SMALL: Final = 1 << 16
"""Largest object kept in the key-value store, in bytes; one rank serves that store to all."""

WAIT_S: Final = 60.0
"""Timeout of a request to the rank that holds an object, in seconds."""

TURN_S: Final = 5.0
"""Longest wait for a request before the network is checked, in seconds."""

END_S: Final = 5.0
"""Longest wait for the sending thread at process exit, in seconds."""

_HEAD: Final = struct.Struct("<d16sq")
"""Header of an entry: time of the put, nonce unique to the put, and size in bytes."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Entry of an object in the key-value store: its bytes, or the rank that holds them."""

    modified: float
    nonce: bytes
    nbytes: int
    data: bytes | None
    holder: int


class _Ask(msgspec.Struct, frozen=True):
    """Request for a range of an object that another rank holds."""

    nonce: bytes
    start: int
    length: int
    rank: int


class DistStore(SimpleStore):
    """Objects in the memory of a job's ranks; each rank opens it at the same point of its program.

    Args:
        name: Name of the store; a job may have several.

    Raises:
        ConfigError: ``torch.distributed`` is not initialised.
    """

    capabilities: Final = Capabilities(conditional_put=True, list_consistent=True, poll_s=0.05)
    _opened: Final[dict[str, DistStore]] = {}

    def __init__(self, name: str) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "dist:// stores live in a job of torch.distributed",
                hint="call torch.distributed.init_process_group first",
            )
        c10d: Any = dist.distributed_c10d
        shared = c10d._get_default_store()
        self._name, self._rank = check_key(name), dist.get_rank()
        self._words: Any = c10d.PrefixStore(f"deltachain-store/{name}", shared.clone())
        self._group = dist.new_group(backend="gloo")
        self._held: dict[bytes, bytes] = {}
        self._newest: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._receiving = threading.Lock()
        self._requests = 0
        asked = c10d.PrefixStore(f"deltachain-store/{name}", shared.clone())
        self._sender = threading.Thread(target=self._send, args=(asked,), daemon=True)
        self._sender.start()
        atexit.register(self._stop)

    @classmethod
    def named(cls, name: str) -> DistStore:
        """Return the store of this name, one in each process."""
        if name not in cls._opened:
            cls._opened[name] = cls(name)
        return cls._opened[name]

    @property
    @override
    def url(self) -> str:
        """URL of the store: ``dist://`` and its name."""
        return f"dist://{self._name}"

    @property
    @override
    def requests(self) -> int:
        """Number of requests to the key-value store, and to ranks that hold objects."""
        return self._requests

    @override
    def _read(self, key: str, choose: Choose) -> bytes:
        while True:  # another put may replace the object meanwhile
            entry = self._require(key)
            data = self._fetch(entry, *choose(entry.nbytes))
            if data is not None:
                return data
            if self._require(key).nonce == entry.nonce:
                raise ObjectNotFoundError(
                    f"rank {entry.holder} no longer holds {key!r}", key=key, url=self.url
                )

    @override
    def put(self, key: str, data: Buffer) -> str:
        check_key(key)
        nonce, word = self._hold(data)
        self._ask(lambda: self._words.set(f"object/{key}", word))
        self._put(key, nonce)
        return ""

    @override
    def put_if_absent(self, key: str, data: Buffer) -> None:
        check_key(key)
        nonce, word = self._hold(data)
        there = self._ask(lambda: self._words.compare_set(f"object/{key}", "", word))
        if bytes(there) != word:
            with self._lock:
                self._held.pop(nonce, None)
            raise already_exists(key, self.url)
        self._put(key, nonce)

    @override
    def find(self, key: str) -> ObjectInfo | None:
        entry = self._look(key)
        if entry is None:
            return None
        return ObjectInfo(key=key, nbytes=entry.nbytes, modified=entry.modified)

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        self._requests += 1
        if not self._ask(lambda: self._words.check(["keys"])):
            return iter(())
        keys = bytes(self._ask(lambda: self._words.get("keys"))).decode().split()
        wanted = sorted({key for key in keys if key.startswith(prefix)})
        return iter(self.find_all(wanted).values())

    @override
    def delete(self, key: str) -> None:
        check_key(key)
        self._requests += 1
        self._ask(lambda: self._words.delete_key(f"object/{key}"))
        with self._lock:
            self._held.pop(self._newest.pop(key, b""), None)

    @override
    def close(self) -> None:
        """Do nothing: other ranks may read this rank's objects until the job ends."""

    def _hold(self, data: Buffer) -> tuple[bytes, bytes]:
        """Keep a large object on this rank; return its nonce and its key-value entry."""
        self._requests += 1
        copied, nonce = bytes(bytes_view(data)), uuid.uuid4().bytes
        head = _HEAD.pack(time.time(), nonce, len(copied))
        if len(copied) <= SMALL:
            return nonce, b"=" + head + copied
        with self._lock:
            self._held[nonce] = copied
        return nonce, b"@" + head + str(self._rank).encode()

    def _put(self, key: str, nonce: bytes) -> None:
        """Publish the entry of a new object, and release the object it replaces."""
        self._ask(lambda: self._words.append("keys", f"{key}\n"))
        with self._lock:
            self._held.pop(self._newest.get(key, b""), None)
            self._newest[key] = nonce

    def _look(self, key: str) -> _Entry | None:
        name = f"object/{check_key(key)}"
        self._requests += 1
        if not self._ask(lambda: self._words.check([name])):
            return None
        word = bytes(self._ask(lambda: self._words.get(name)))
        modified, nonce, nbytes = _HEAD.unpack_from(word, 1)
        rest = word[1 + _HEAD.size :]
        if word[:1] == b"=":
            return _Entry(modified, nonce, nbytes, rest, -1)
        return _Entry(modified, nonce, nbytes, None, int(rest))

    def _require(self, key: str) -> _Entry:
        entry = self._look(key)
        if entry is None:
            raise not_found(key, self.url)
        return entry

    def _fetch(self, entry: _Entry, start: int, length: int) -> bytes | None:
        """Return a range of an object; None if the object no longer exists."""
        if entry.data is not None:
            return entry.data[start : start + length]
        if entry.holder != self._rank:
            return self._receive(entry, start, length)
        with self._lock:
            held = self._held.get(entry.nonce)
        return None if held is None else held[start : start + length]

    def _receive(self, entry: _Entry, start: int, length: int) -> bytes | None:
        """Request a range of an object from the rank that holds it."""
        ask, place = _Ask(entry.nonce, start, length, self._rank), entry.holder
        self._requests += 1
        with self._receiving:
            number = self._ask(lambda: self._words.add(f"asks/{place}", 1))
            word = msgspec.msgpack.encode(ask)
            self._ask(lambda: self._words.set(f"ask/{place}/{number}", word))
            try:
                answer = bytes(self._await(f"answer/{place}/{number}"))
            except StoreUnavailableError:
                word = msgspec.msgpack.encode(msgspec.structs.replace(ask, length=0))
                self._ask(lambda: self._words.set(f"ask/{place}/{number}", word))
                raise
            if answer != b"here":
                return None
            arrived = torch.empty(length, dtype=torch.uint8)
            if length:
                self._ask(lambda: dist.recv(arrived, src=place, group=self._group, tag=number))
        return arrived.numpy().tobytes()

    def _send(self, words: Any) -> None:  # noqa: ANN401 - a store of torch.distributed
        """Serve requests of other ranks one by one, until this process or the job ends."""
        for number in itertools.count(1):
            name = f"ask/{self._rank}/{number}"
            try:
                if not self._is_asked(words, name, number):
                    continue
                word = bytes(words.get(name))
                words.delete_key(name)
                if not word:
                    return
                self._answer(words, number, msgspec.msgpack.decode(word, type=_Ask))
            except dist.DistError:
                return  # the job is over
            except RuntimeError:
                continue  # the requesting rank has exited

    def _is_asked(self, words: Any, name: str, number: int) -> bool:  # noqa: ANN401 - as above
        """Wait for a request; skip one whose sender died before it wrote the request."""
        while True:
            try:
                words.wait([name], timedelta(seconds=TURN_S))
            except dist.DistNetworkError:
                raise
            except dist.DistStoreError:  # no request yet
                if words.add(f"asks/{self._rank}", 0) > number and not words.check([name]):
                    return False
            else:
                return True

    def _answer(self, words: Any, number: int, ask: _Ask) -> None:  # noqa: ANN401 - as above
        with self._lock:
            held = self._held.get(ask.nonce)
        words.set(f"answer/{self._rank}/{number}", b"gone" if held is None else b"here")
        if held is not None and ask.length:
            view = bytearray(held[ask.start : ask.start + ask.length])
            tensor = torch.frombuffer(view, dtype=torch.uint8)
            sending = dist.isend(tensor, dst=ask.rank, group=self._group, tag=number)
            if sending is not None:  # the requesting rank may have exited, and others wait
                sending.wait(timedelta(seconds=WAIT_S))

    def _stop(self) -> None:
        """Stop the sending thread: the interpreter cannot exit while it waits."""
        with suppress(StoreUnavailableError):
            number = self._ask(lambda: self._words.add(f"asks/{self._rank}", 1))
            self._ask(lambda: self._words.set(f"ask/{self._rank}/{number}", b""))
        self._sender.join(END_S)

    def _await(self, name: str) -> Any:  # noqa: ANN401 - bytes
        self._ask(lambda: self._words.wait([name], timedelta(seconds=WAIT_S)))
        answer = self._ask(lambda: self._words.get(name))
        self._ask(lambda: self._words.delete_key(name))
        return answer

    def _ask(self, question: Any) -> Any:  # noqa: ANN401 - of torch.distributed
        try:
            return question()
        except (dist.DistError, RuntimeError) as exc:
            message = str(exc).partition("\n")[0]
            raise StoreUnavailableError(f"{self.url}: {message}", url=self.url) from exc


def open_dist(url: str, options: Mapping[str, Any], *, writer: bool) -> DistStore:  # noqa: ARG001
    """Open ``dist://name``, in every rank of the job at the same point of its program.

    Raises:
        ConfigError: There are options, or ``torch.distributed`` is not initialised.
    """
    parts = split_url(url, options)
    return DistStore.named(f"{parts.netloc}{parts.path}".rstrip("/"))
