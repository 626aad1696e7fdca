"""Writer of a replica's presence: a thread that renews one object while the replica lives."""

from __future__ import annotations

import logging
import platform
import random
import re
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import Event, Thread
from types import TracebackType
from typing import Final

from typing_extensions import override

from deltachain.errors import DeltaChainError
from deltachain.figures import Figure, figures
from deltachain.format.keys import object_digest
from deltachain.presence.record import LARGEST, PresenceRecord, encode_record, parse_record
from deltachain.replica.settings import ReplicaSettings
from deltachain.status import Status
from deltachain.store import Capabilities, open_store
from deltachain.store.apart import check_apart
from deltachain.threads import Closeable, started
from deltachain.version import __version__

LEAST_S: Final = 10.0
"""Least seconds between two writes."""

POLLS: Final = 6
"""Poll intervals of the store between two writes: a sixth of the requests of a reader's polls."""

CLOSE_S: Final = 5.0
"""Seconds for which the end of a replica waits for its last write."""

logger = logging.getLogger(__name__)


def interval_s(capabilities: Capabilities) -> float:
    """Return the seconds between two writes that a store's budget of requests allows."""
    return max(LEAST_S, POLLS * capabilities.poll_s)


def record_key(engine: str, place: str) -> str:
    """Return the key of a replica's record, the same whenever it starts again.

    Two replicas of one host name, kind and place have the same key; see :class:`PresenceWriter`.

    Args:
        engine: What the replica is: ``vllm/0.32.0``, ``follow``, ``mirror``.
        place: What it has for itself on its machine: an address, a folder, a destination.
    """
    names = (socket.gethostname(), engine.partition("/")[0])
    host, kind = (re.sub(r"[^A-Za-z0-9-]+", "-", name).strip("-")[:100] for name in names)
    return f"{host or 'host'}-{kind or 'replica'}-{object_digest(place.encode())[:8]}.json"


class PresenceWriter(Closeable):
    """Renews the presence of a replica until it is closed; never raises, and never delays it.

    A failed write is counted, logged once, and tried again when the next one is due. A clean end
    removes the record, or marks it where nothing may be deleted. An end by an error leaves the
    reason in it.

    If another running replica writes the same record, this one renews another record from then on,
    and logs a warning. Without the right to read the record it cannot notice that.

    Args:
        url: URL of the records; each replica has one object of its own there.
        status: Returns the status of the replica, from memory; called in the writer's thread.
        engine: What the replica is; see :func:`record_key`.
        place: What it has for itself; see :func:`record_key`.
        apart_from: URLs of chains that the URL must be apart from.
        every_s: Seconds between two writes; by default what the store's budget allows.

    Attributes:
        key: Key of its record; changes if another replica writes the same record.
        every_s: Seconds between two writes, on average.

    Raises:
        ConfigError: The URL is invalid, or not apart from a chain.
    """

    def __init__(
        self,
        url: str,
        status: Callable[[], Status],
        *,
        engine: str,
        place: str,
        apart_from: Iterable[str],
        every_s: float | None = None,
    ) -> None:
        for chain in apart_from:
            check_apart(url, chain)
        self._store = open_store(url)
        self._status = status
        self.key = record_key(engine, place)
        self.every_s = every_s or interval_s(self._store.capabilities)
        self._failures = 0
        self._written_at: float | None = None
        self._times: deque[float] = deque(maxlen=100)  # of its records, also if a reply was lost
        self._has_failed = False
        self._reason = ""
        self._stop = Event()
        self._thread = Thread(target=self._run, name="deltachain-presence", daemon=True)
        self._is_started = started(self._thread)
        if not self._is_started:
            self._failed(DeltaChainError("no thread can be started"))

    def figures(self) -> Iterator[Figure]:
        """Yield the figures of the writer, from memory."""
        yield from figures(
            {
                "presence_timestamp_seconds": self._written_at,
                "presence_failures": self._failures,
            }
        )

    @override
    def close(self) -> None:
        """Withdraw the presence, unless the store takes too long; idempotent."""
        self._stop.set()
        if self._is_started:
            self._thread.join(CLOSE_S)

    def fail(self, reason: str) -> None:
        """End as :meth:`close` does, and leave the reason in the record."""
        self._reason = reason
        self.close()

    @override
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            self.fail(str(error.args[0]) if isinstance(error, DeltaChainError) else repr(error))
        else:
            self.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._try(self._write)
            self._stop.wait(self.every_s * random.uniform(0.8, 1.2))  # noqa: S311 - no secret
        self._try(self._leave)
        self._store.close()

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as exc:  # noqa: BLE001 - a replica serves on, whatever happens here
            self._failed(exc)
        else:
            self._has_failed = False

    def _failed(self, exc: Exception) -> None:
        self._failures += 1
        if not self._has_failed:
            logger.warning("the presence of this replica is not written: %s", exc)
        self._has_failed = True

    def _write(self, ended: str | None = None) -> None:
        if self._is_shared():
            key, self.key = self.key, self.key.replace(".json", f"-{secrets.token_hex(4)}.json")
            logger.warning("another replica writes the presence %s: this one is %s", key, self.key)
        status, now = self._status(), time.time()
        software = {"deltachain": __version__, "python": platform.python_version()}
        name, _, version = status.engine.partition("/")
        if version:
            software[name] = version
        record = PresenceRecord(time=now, status=status, software=software, ended=ended)
        self._times.append(now)
        self._store.put(self.key, encode_record(record))
        self._written_at = now

    def _is_shared(self) -> bool:
        """Whether another replica has written the record since this one did."""
        if not self._times:
            return False  # it may be of the last start
        try:
            data = self._store.get(self.key, limit=LARGEST)
            written_at = parse_record(data, self.key).time
        except DeltaChainError:  # without the right to read, for example
            return False
        return written_at > self._times[0] and written_at not in self._times

    def _leave(self) -> None:
        if self._reason:
            self._write(self._reason)
            return
        try:
            self._store.delete(self.key)
        except DeltaChainError:
            self._write("")


def replica_presence(
    settings: ReplicaSettings, status: Callable[[], Status], *, engine: str, place: str
) -> PresenceWriter | None:
    """Begin to write the presence of a replica, if its settings name a URL for that.

    Args:
        settings: Settings of the replica.
        status: As of :class:`PresenceWriter`, as are the next two.
        engine: What the replica is.
        place: What it has for itself.

    Raises:
        ConfigError: As :class:`PresenceWriter`.
    """
    if not settings.presence:
        return None
    chain = settings.subscribe.url
    return PresenceWriter(settings.presence, status, engine=engine, place=place, apart_from=[chain])
