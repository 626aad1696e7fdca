"""A store with scripted faults, for crash and corruption tests."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias, TypeVar
from unittest import mock

from typing_extensions import override

from deltachain.errors import AlreadyExistsError, StorePermissionError, StoreUnavailableError
from deltachain.store import base
from deltachain.types import Buffer

Action: TypeAlias = Literal[
    "kill",
    "kill-after",
    "fail",
    "lose-reply",
    "full",
    "refuse",
    "own-412",
    "fail-read",
    "cut",
    "corrupt",
    "truncate",
    "hide",
    "stale-list",
    "slow",
]
"""Actions of a fault.

Writes: ``kill`` and ``kill-after`` send SIGKILL to this process before or after the write; ``fail``
and ``lose-reply`` raise StoreUnavailableError without and with the write; ``full`` and ``refuse``
are a full disk and a missing permission. ``own-412`` (only ``put_if_absent``) writes the object and
raises AlreadyExistsError, like a repeated request after a lost reply.

Reads: ``cut`` ends the body in the middle (StoreUnavailableError); ``corrupt`` flips a bit in the
middle; ``truncate`` drops the last byte. ``fail-read`` and ``hide`` apply to ``find`` as well: the
store is unavailable, or does not find the object. ``fail-read`` also applies to listings.

Listings: ``stale-list`` omits objects that were created after the fault was added, and sets the
capability accordingly. ``find`` is not affected; use ``hide`` for that.

All calls: ``slow`` adds a delay of ``seconds``.

Status codes 500 and 503 are both ``fail`` or ``fail-read``.
"""

_T = TypeVar("_T")

_PUTS: Final = frozenset({"kill", "kill-after", "fail", "lose-reply", "full", "refuse", "slow"})
_CREATES: Final = _PUTS | {"own-412"}
_READS: Final = frozenset({"fail-read", "cut", "corrupt", "truncate", "hide", "slow"})
_LOOKS: Final = frozenset({"fail-read", "hide", "slow"})
_LISTS: Final = frozenset({"fail-read", "stale-list", "slow"})
_DELETES: Final = frozenset({"slow"})


@dataclass(frozen=True, slots=True)
class Fault:
    """One scripted fault.

    Attributes:
        do: The action, or a function that is called before a write.
        prefix: Prefix of affected keys.
        nth: First affected call, counted from 1.
        times: Number of affected calls in a row; None for all.
        seconds: Delay of a ``slow`` call.
    """

    do: Action | Callable[[], object]
    prefix: str = ""
    nth: int = 1
    times: int | None = 1
    seconds: float = 0.0

    def strikes(self, call: int) -> bool:
        return self.nth <= call and (self.times is None or call < self.nth + self.times)


class FaultyStore(base.Store):
    """Store wrapper with scripted faults.

    Args:
        inner: The wrapped store.
        faults: The faults.

    Attributes:
        inner: The wrapped store, to bypass faults.
        down: While true, every call raises StoreUnavailableError.
        struck: Action and key of every fault that applied, oldest first.
        keys_read: Keys of all whole reads, oldest first.
    """

    def __init__(self, inner: base.Store, *faults: Fault) -> None:
        self.inner = inner
        self.down = False
        self.struck: list[tuple[str, str]] = []
        self.keys_read: list[str] = []
        self._calls: dict[Fault, int] = {}
        self._listed: dict[Fault, frozenset[str]] = {}
        self._lock = threading.Lock()
        self.add(*faults)

    def add(self, *faults: Fault) -> None:
        listed = {
            fault: frozenset(found.key for found in self.inner.list())
            for fault in faults
            if fault.do == "stale-list"
        }
        with self._lock:
            self._calls.update(dict.fromkeys(faults, 0))
            self._listed.update(listed)

    def mend(self) -> None:
        with self._lock:
            self._calls.clear()
            self._listed.clear()
        self.down = False

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> base.Capabilities:
        if not self._listed:
            return self.inner.capabilities
        return replace(self.inner.capabilities, list_consistent=False)

    @property
    def requests(self) -> int:
        return self.inner.requests

    @override
    def get(self, key: str, *, limit: int = base.MAX_DOCUMENT) -> bytes:
        self._check_up(key)
        return self._spoiled(key, self.inner.get(key, limit=limit))

    @override
    def read(self, key: str, *, nbytes: int, pin: str = "") -> bytes:
        self._check_up(key)
        data = bytes(self.inner.read(key, nbytes=nbytes, pin=pin))
        data = self._spoiled(key, data)
        base.check_nbytes(key, self.url, expected=nbytes, actual=len(data))
        return data

    @override
    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._check_up(key)
        data = self._spoiled(key, self.inner.get_range(key, start, length))
        base.check_nbytes(key, self.url, expected=length, actual=len(data))
        return data

    @override
    def put(self, key: str, data: Buffer) -> str:
        return self._write(key, data, self.inner.put, _PUTS)

    @override
    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._write(key, data, self.inner.put_if_absent, _CREATES)

    @override
    def find(self, key: str) -> base.ObjectInfo | None:
        self._check_up(key)
        hidden = False
        for fault in self._due(key, _LOOKS):
            self._fail_read(fault, key)
            hidden |= fault.do == "hide"
        return None if hidden else self.inner.find(key)

    @override
    def find_all(self, keys: Iterable[str]) -> Mapping[str, base.ObjectInfo]:
        return base.find_each(self, keys)

    @override
    def list(self, prefix: str = "") -> Iterator[base.ObjectInfo]:
        self._check_up(prefix)
        found = self.inner.list(prefix)
        for fault in self._due(prefix, _LISTS):
            self._fail_read(fault, prefix)
            if fault.do == "stale-list":
                known = self._listed[fault]
                about = fault.prefix
                found = iter([i for i in found if i.key in known or not i.key.startswith(about)])
        return found

    @override
    def delete(self, key: str) -> None:
        self._check_up(key)
        self._due(key, _DELETES)
        self.inner.delete(key)

    @override
    def clock(self) -> float | None:
        return self.inner.clock()

    @override
    def close(self) -> None:
        """Do nothing: the test owns the wrapped store."""

    def _spoiled(self, key: str, data: bytes) -> bytes:
        self.keys_read.append(key)
        for fault in self._due(key, _READS):
            data = self._spoil(fault, key, data)
        return data

    def _write(
        self,
        key: str,
        data: Buffer,
        write: Callable[[str, Buffer], _T],
        actions: frozenset[str],
    ) -> _T:
        self._check_up(key)
        due = self._due(key, actions)
        for fault in due:
            self._before(fault, key)
        result = write(key, data)
        for fault in due:
            if fault.do == "kill-after":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.do == "lose-reply":
                raise StoreUnavailableError(f"{key!r}: reply lost", key=key, url=self.url)
            if fault.do == "own-412":
                raise AlreadyExistsError(f"{key!r}: precondition failed", key=key, url=self.url)
        return result

    def _before(self, fault: Fault, key: str) -> None:
        if callable(fault.do):
            fault.do()
        elif fault.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.do == "fail":
            raise StoreUnavailableError(f"{key!r}: unavailable", key=key, url=self.url)
        elif fault.do == "full":
            hint = "the disk is full: free some space, then try again"
            raise StoreUnavailableError(f"{key!r}: no space", key=key, url=self.url, hint=hint)
        elif fault.do == "refuse":
            raise StorePermissionError(f"{key!r}: refused", key=key, url=self.url)

    def _fail_read(self, fault: Fault, key: str) -> None:
        if fault.do == "fail-read":
            raise StoreUnavailableError(f"{key!r}: unavailable", key=key, url=self.url)

    def _spoil(self, fault: Fault, key: str, data: bytes) -> bytes:
        self._fail_read(fault, key)
        if fault.do == "hide":
            raise base.not_found(key, self.url)
        if fault.do == "cut":
            message = f"{key!r}: the body ended after {len(data) // 2} of {len(data)} bytes"
            raise StoreUnavailableError(message, key=key, url=self.url)
        if fault.do == "truncate":
            return data[:-1]
        if fault.do == "corrupt":
            middle = len(data) // 2
            return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]
        return data

    def _due(self, key: str, actions: frozenset[str]) -> Sequence[Fault]:
        lists = actions is _LISTS  # a listing matches all keys below its prefix
        with self._lock:
            about = [
                fault
                for fault in self._calls
                if (key.startswith(fault.prefix) or (lists and fault.prefix.startswith(key)))
                and (fault.do in actions or (callable(fault.do) and "kill" in actions))
            ]
            for fault in about:
                self._calls[fault] += 1
            struck = [fault for fault in about if fault.strikes(self._calls[fault])]
            self.struck += [(str(fault.do), key) for fault in struck]
        for fault in struck:
            if fault.do == "slow":
                time.sleep(fault.seconds)
        return struck

    def _check_up(self, key: str) -> None:
        if self.down:
            raise StoreUnavailableError(f"{key!r}: the store is down", key=key, url=self.url)


@contextmanager
def clock_jump(seconds: float) -> Iterator[None]:
    clock = time.time

    def jumped() -> float:
        return clock() + seconds

    with mock.patch.object(time, "time", jumped):
        yield
