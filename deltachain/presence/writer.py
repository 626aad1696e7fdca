"""Writer of a replica's presence: a thread that renews one object while the replica lives."""

import logging
import platform
import re
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Final

from deltachain.checkpoint import HELD_FILE
from deltachain.errors import ControlPlaneError, DeltaChainError, StoreUnavailableError
from deltachain.format.keys import object_digest
from deltachain.metrics import Figure, figures
from deltachain.presence.record import LARGEST, PresenceRecord, encode_record, parse_record
from deltachain.replica.settings import ReplicaSettings
from deltachain.retry import RANDOM
from deltachain.status import HealthLimits, Status, judged, lag
from deltachain.store import Capabilities, check_apart, open_store
from deltachain.subscribe.subscriber import NOTHING_HELD, known_status
from deltachain.threads import Closeable, started
from deltachain.version import __version__

if TYPE_CHECKING:
    from deltachain.mirror.mirror import Mirror, MirrorTotals
    from deltachain.subscribe import Subscriber


def follower_status(
    subscriber: "Subscriber",
    given: Mapping[str, Any],
    *,
    engine: str,
    trouble: DeltaChainError | None,
    unready: str = "",
) -> Status:
    status = known_status(subscriber, engine=engine, trouble=str(trouble) if trouble else "")
    folder, waits = getattr(subscriber.target, "folder", None), unready
    if status.version is None:
        waits = NOTHING_HELD
    elif isinstance(folder, Path) and not (folder / HELD_FILE).exists():
        waits = f"{folder} was removed, or its {HELD_FILE} was"
    if isinstance(trouble, ControlPlaneError):  # the server of an agent does not have the version
        waits = str(trouble.args[0])
    return judged(status, _limits(given), waits)


def mirror_status(
    mirror: "Mirror", totals: "MirrorTotals", given: Mapping[str, Any], *, url: str
) -> Status:
    version, head, trouble = totals.version_of(mirror), totals.head_of(mirror), totals.trouble
    # A source that does not answer is a matter of silence; all else keeps versions from readers.
    is_away = isinstance(trouble, StoreUnavailableError) and trouble.url != mirror.destination.url
    kept_back = str(trouble.args[0]) if trouble is not None and not is_away else ""
    status = Status(
        url=url,
        chain=mirror.chain,
        version=version,
        head=head,
        lag_versions=lag(head, version),
        ready=True,
        reason="",
        trouble=str(trouble) if trouble else "",
        deltachain=__version__,
        engine="mirror",
        looked_at=totals.looked_at,
        applied_at=totals.applied_at,
        silence_s=totals.silence_of(mirror),
    )
    return judged(status, _limits(given), kept_back if version is not None else NOTHING_HELD)


def _limits(given: Mapping[str, Any]) -> HealthLimits:
    return HealthLimits(lag=given.get("MAX_LAG"), silence_s=given.get("MAX_SILENCE_S"))


LEAST_S: Final = 10.0  # least seconds between two writes
POLLS: Final = 6  # of the store, between two writes: a sixth of a reader's requests
CLOSE_S: Final = 5.0  # seconds for which the end of a replica waits for its last write

logger = logging.getLogger(__name__)


def interval_s(capabilities: Capabilities) -> float:
    return max(LEAST_S, POLLS * capabilities.poll_s)


def record_key(engine: str, place: str) -> str:
    names = (socket.gethostname(), engine.partition("/")[0])
    host, kind = (re.sub(r"[^A-Za-z0-9-]+", "-", name).strip("-")[:100] for name in names)
    return f"{host or 'host'}-{kind or 'replica'}-{object_digest(place.encode())[:8]}.json"


class PresenceWriter(Closeable):
    """Renews the presence of a replica until it is closed; never raises, and never delays it.

    A clean end removes the record, or marks it where nothing may be deleted. An end by an error
    leaves the reason in it. If another running replica writes the same record, this one renews
    another from then on. Without the right to read the record it cannot notice that.
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
        yield from figures(
            {"presence_timestamp_seconds": self._written_at, "presence_failures": self._failures}
        )

    def close(self) -> None:
        """Withdraw the presence, unless the store takes too long; idempotent."""
        self._stop.set()
        if self._is_started:
            self._thread.join(CLOSE_S)

    def fail(self, reason: str) -> None:
        self._reason = reason
        self.close()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            self.fail(str(error.args[0]) if isinstance(error, DeltaChainError) else repr(error))
        else:
            self.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._try(self._write)
            self._stop.wait(self.every_s * RANDOM.uniform(0.8, 1.2))
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
    if not settings.presence:
        return None
    chain = settings.subscribe.url
    return PresenceWriter(settings.presence, status, engine=engine, place=place, apart_from=[chain])
