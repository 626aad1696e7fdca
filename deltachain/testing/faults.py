"""A store that goes wrong by script, for crash and corruption tests.

>>> FaultyStore(inner, Fault("kill-after", "manifests/", nth=2))        # doctest: +SKIP
>>> FaultyStore(inner, Fault("corrupt", "deltas/", times=None))         # doctest: +SKIP

Each fault counts the calls that it is about: those that write, read or list, as its action says, an
object whose key begins with its prefix. It strikes from the ``nth`` on, ``times`` times.
``clock_jump`` sets the clock of this process instead.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias, TypeVar
from unittest import mock

from deltachain.errors import AlreadyExistsError, StorePermissionError, StoreUnavailableError
from deltachain.store.base import (
    MAX_DOCUMENT,
    Capabilities,
    ObjectInfo,
    Store,
    check_nbytes,
    find_each,
    not_found,
)
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
"""What goes wrong.

Of writes: ``kill`` and ``kill-after`` end this process by SIGKILL, before or after the object is
there; ``fail`` and ``lose-reply`` say that the store is unavailable, without and with the effect;
``full`` and ``refuse`` are a full disk and missing permission. ``own-412``, of ``put_if_absent``
alone, writes the object and then says that there is one: a request that was repeated after its
reply was lost.

Of reads: ``cut`` ends a body in the middle, which a store says to be unavailable; ``corrupt`` flips
a bit in the middle, ``truncate`` leaves the last byte out. ``fail-read`` and ``hide`` are of looks
as well: the store is unavailable, or finds no such object. ``fail-read`` is of listings too.

Of listings: ``stale-list`` shows no object that was not there when the fault was added, and makes
the store say that it does so. ``find`` is not stale; ``hide`` is for that.

Of every call: ``slow`` makes it take ``seconds`` more.

A 500 and a 503 are both ``fail`` or ``fail-read``: a store has no status codes.
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
    """One line of the script.

    Attributes:
        do: What goes wrong, or a function that is called before a write.
        prefix: Of the keys that it is about.
        nth: The first call that it strikes, counted from 1.
        times: How many calls in a row it strikes; None for all that follow.
        seconds: How much longer a ``slow`` call takes.
    """

    do: Action | Callable[[], object]
    prefix: str = ""
    nth: int = 1
    times: int | None = 1
    seconds: float = 0.0

    def strikes(self, call: int) -> bool:
        """Whether it strikes the ``call``-th call that it is about."""
        return self.nth <= call and (self.times is None or call < self.nth + self.times)


class FaultyStore:
    """Another store, and what goes wrong with it.

    Args:
        inner: The store.
        faults: What goes wrong, and when.

    Attributes:
        inner: The store itself, for a look behind the faults.
        down: While set, every call says that the store is unavailable.
        struck: The action and the key of every fault that struck, oldest first.
        keys_read: Every key that was read whole, oldest first.
    """

    def __init__(self, inner: Store, *faults: Fault) -> None:
        self.inner = inner
        self.down = False
        self.struck: list[tuple[str, str]] = []
        self.keys_read: list[str] = []
        self._calls: dict[Fault, int] = {}
        self._listed: dict[Fault, frozenset[str]] = {}
        self._lock = threading.Lock()
        self.add(*faults)

    def add(self, *faults: Fault) -> None:
        """Lengthen the script; its counts begin now."""
        listed = {
            fault: frozenset(found.key for found in self.inner.list())
            for fault in faults
            if fault.do == "stale-list"
        }
        with self._lock:
            self._calls.update(dict.fromkeys(faults, 0))
            self._listed.update(listed)

    def mend(self) -> None:
        """Nothing goes wrong any more."""
        with self._lock:
            self._calls.clear()
            self._listed.clear()
        self.down = False

    @property
    def url(self) -> str:
        """That of the store."""
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        """Those of the store; its listings may be stale where the script says so."""
        if not self._listed:
            return self.inner.capabilities
        return replace(self.inner.capabilities, list_consistent=False)

    @property
    def requests(self) -> int:
        """Those of the store."""
        return self.inner.requests

    def get(self, key: str, *, limit: int = MAX_DOCUMENT) -> bytes:
        """Read a whole small object; see ``Store``."""
        self._check_up(key)
        return self._spoiled(key, self.inner.get(key, limit=limit))

    def read(self, key: str, *, nbytes: int, pin: str = "") -> bytes:
        """Read a whole object of known size; see ``Store``."""
        self._check_up(key)
        data = bytes(self.inner.read(key, nbytes=nbytes, pin=pin))
        data = self._spoiled(key, data)
        check_nbytes(key, self.url, expected=nbytes, actual=len(data))
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read a range, out of an object that may have gone wrong; see ``Store``."""
        return self.get(key)[start : start + length]

    def put(self, key: str, data: Buffer) -> str:
        """Write an object; see ``Store``."""
        return self._write(key, data, self.inner.put, _PUTS)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Write an object under a key that has none; see ``Store``."""
        self._write(key, data, self.inner.put_if_absent, _CREATES)

    def find(self, key: str) -> ObjectInfo | None:
        """Look an object up; see ``Store``."""
        self._check_up(key)
        hidden = False
        for fault in self._due(key, _LOOKS):
            self._fail_read(fault, key)
            hidden |= fault.do == "hide"
        return None if hidden else self.inner.find(key)

    def find_all(self, keys: Iterable[str]) -> Mapping[str, ObjectInfo]:
        """Look several objects up, each as ``find`` does; see ``Store``."""
        return find_each(self, keys)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object; see ``Store``."""
        self._check_up(prefix)
        found = self.inner.list(prefix)
        for fault in self._due(prefix, _LISTS):
            self._fail_read(fault, prefix)
            if fault.do == "stale-list":
                known = self._listed[fault]
                about = fault.prefix
                found = iter([i for i in found if i.key in known or not i.key.startswith(about)])
        return found

    def delete(self, key: str) -> None:
        """Remove an object; see ``Store``."""
        self._check_up(key)
        self._due(key, _DELETES)
        self.inner.delete(key)

    def close(self) -> None:
        """Leave the store open: it belongs to the test."""

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
        """What goes wrong before anything is written."""
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
        """What goes wrong with bytes on their way here."""
        self._fail_read(fault, key)
        if fault.do == "hide":
            raise not_found(key, self.url)
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
        """The faults that strike this call, which counts for every fault that it is about."""
        lists = actions is _LISTS  # which are about all that begins with the key
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
    """Set the wall clock of this process forward, or back where negative; jumps add up.

    ``time.time`` alone jumps, and with it what publishers, subscribers and stores in memory write
    down. ``time.monotonic`` and ``time.perf_counter`` go on, as they do when a clock is set.
    """
    clock = time.time

    def jumped() -> float:
        return clock() + seconds

    with mock.patch.object(time, "time", jumped):
        yield
