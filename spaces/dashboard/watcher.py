"""Watcher: threads that keep a chain's index and the reports of its replicas up to date."""

import logging
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from math import inf
from threading import Event, Lock, Thread
from typing import Final, TypeVar

import msgspec

from deltachain.control.replica_client import ReplicaClient
from deltachain.control.roster import ReplicaAnswer, Roster
from deltachain.errors import ConfigError, ControlPlaneError, DeltaChainError
from deltachain.format.documents import valid_times
from deltachain.presence.record import PresenceBoard
from deltachain.redact import printable
from deltachain.status import Health, HealthLimits, Status, complaints
from deltachain.threads import Closeable, started
from deltachain.types import Version
from spaces.dashboard.chain_index import ChainIndex, ChainView

REPLICA_PHASES: Final = ("look", "fetch", "stage", "pause", "swap")
"""Phases after the commit, in their order; ``swap`` is a part of ``pause``."""

KEPT: Final = 20_000  # applies that are kept: one of each version and replica

PhaseTimes = Mapping[str, float]  # seconds of phases, by name


def replica_phases(given: Mapping[str, object]) -> dict[str, float]:
    return valid_times(given, REPLICA_PHASES)


def middle(applies: Mapping[str, PhaseTimes]) -> dict[str, float]:
    found = {}
    for name in REPLICA_PHASES:
        times = [times[name] for times in applies.values() if name in times]
        if times:
            found[name] = statistics.median(times)
    return found


class PhaseTrack:
    """Phase times of each version in the replicas that applied it, by manifest; thread-safe.

    Beyond ``KEPT`` applies, those of the version that was seen first are forgotten.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._count = 0
        self._applies: OrderedDict[str, dict[str, PhaseTimes]] = OrderedDict()
        self._middles: dict[str, PhaseTimes] = {}
        self.revision = 0
        self._changing = Lock()

    def add(self, engine: str, manifest: str, times: PhaseTimes) -> None:
        with self._changing:
            if not manifest or not times or self._applies.get(manifest, {}).get(engine) == times:
                return
            applies = self._applies.setdefault(manifest, {})
            self._count += engine not in applies
            applies[engine] = times
            self._middles.pop(manifest, None)
            self.revision += 1
            while self._count > self._kept and len(self._applies) > 1:
                forgotten, lost = self._applies.popitem(last=False)
                self._count -= len(lost)
                self._middles.pop(forgotten, None)

    def of(self, manifest: str) -> dict[str, PhaseTimes]:
        with self._changing:
            return dict(self._applies.get(manifest, {}))

    def middles(self) -> dict[str, PhaseTimes]:
        with self._changing:
            for manifest in self._applies.keys() - self._middles.keys():
                self._middles[manifest] = middle(self._applies[manifest])
            return dict(self._middles)


LARGEST: Final = (1 << 53) - 1  # largest number that a browser holds exactly


UNKNOWN: Final = Status(
    url="", chain=None, version=None, head=None, lag_versions=None, ready=False, reason=""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    engine: str  # its address, or the URL of its record on a board
    answered_at: float | None = None  # seconds since 1970 on the dashboard's clock
    trouble: str = ""  # why it did not answer the last time; empty if it did
    status: Status = UNKNOWN  # with texts cut, and without numbers out of range


def answered(engine: str, status: Status, now: float) -> ReplicaReport:
    silence_s, applied = status.silence_s, (status.last or {}).get("version")
    texts = {
        name: printable(text)
        for name in status.__struct_fields__
        if isinstance(text := getattr(status, name), str)
    }
    shown = msgspec.structs.replace(
        status,
        **texts,
        version=_number(status.version),
        head=_number(status.head),
        silence_s=silence_s if silence_s is not None and 0 <= silence_s < LARGEST else None,
        phases=replica_phases(status.phases) if applied == status.version else {},
        classes={},
        on_host={},
        ranks=[],
        last=None,
    )
    return ReplicaReport(engine=engine, answered_at=now, status=shown)


def seen(engine: str, found: ReplicaAnswer, now: float) -> ReplicaReport:
    """Return the report of a replica that was asked beside others, or whose presence was read."""
    if isinstance(found, DeltaChainError):
        return ReplicaReport(engine=engine, trouble=trouble(engine, found))
    if isinstance(found, Status):
        return answered(engine, found, now)
    report = answered(engine, found.status, now - found.age_s)
    return replace(report, trouble=printable(f"it ended: {found.ended}")) if found.ended else report


def trouble(engine: str, exc: DeltaChainError) -> str:
    said = str(exc.args[0]) if exc.args else type(exc).__name__
    return printable(said.removeprefix(engine).strip(": ").removeprefix("did not answer: "))


def _number(value: int | None) -> Version | None:
    return value if value is not None and 0 <= value <= LARGEST else None


_T = TypeVar("_T")

MOMENTS: Final = 2048  # above that, every second moment is forgotten


@dataclass(frozen=True, slots=True)
class Moment:
    """The newest version, and those held by replicas, at one time; ``None`` if unknown."""

    time: float
    newest: Version | None
    held: Mapping[str, Version | None]


@dataclass(slots=True)
class FleetTrack:
    """Moments of a fleet, at distances that double when the memory is full; thread-safe."""

    _moments: list[Moment] = field(default_factory=list)
    _skipped: int = 0
    _stride: int = 1
    _changing: Lock = field(default_factory=Lock)

    def add(self, moment: Moment) -> None:
        with self._changing:
            self._skipped += 1
            if self._skipped < self._stride:
                return
            self._skipped = 0
            self._moments.append(moment)
            if len(self._moments) > MOMENTS:
                self._moments = self._moments[::2]
                self._stride *= 2

    def moments(self, most: int) -> list[Moment]:
        with self._changing:
            return spread(self._moments, most)


def changes(moments: Iterable[Moment], engine: str) -> list[tuple[int, Version | None]]:
    found: list[tuple[int, Version | None]] = []
    for place, moment in enumerate(moments):
        version = moment.held.get(engine)
        if not found or found[-1][1] != version:
            found.append((place, version))
    return found


def spread(values: Sequence[_T], most: int) -> list[_T]:
    if len(values) <= most:
        return list(values)
    return [values[-1 - place * len(values) // most] for place in range(most)][::-1]


class AlertKind(StrEnum):
    STORE = "store"
    HISTORY = "history"
    ANOTHER_CHAIN = "another chain"
    SILENT = "silent"
    CUT_OFF = "cut off"
    NOT_READY = "not ready"
    BEHIND = "behind"


@dataclass(frozen=True, slots=True)
class Alert:
    kind: AlertKind
    engine: str
    message: str


KINDS: Final[dict[Health, AlertKind]] = {
    "failed": AlertKind.NOT_READY,
    "poisoned": AlertKind.NOT_READY,
    "in doubt": AlertKind.NOT_READY,
    "not ready": AlertKind.NOT_READY,
    "cut off": AlertKind.CUT_OFF,
    "stale": AlertKind.BEHIND,
}

MAX_LAG: Final = 8  # largest lag without an alert, in versions, by default


def newest_known(view: ChainView, reports: Iterable[ReplicaReport]) -> Version | None:
    """Return the newest version that the store, or a replica since it was asked, has shown."""
    heads = [view.newest, *(report.status.head for report in reports if _counts(view, report))]
    return max((head for head in heads if head is not None), default=None)


def alerts(
    view: ChainView, reports: Iterable[ReplicaReport], limits: HealthLimits, now: float
) -> tuple[Alert, ...]:
    reports = tuple(reports)
    newest = newest_known(view, reports)
    found = list(_of_chain(view))
    for report in reports:
        found += _of_replica(view, report, limits, newest, now)
    order = list(AlertKind)
    return tuple(sorted(found, key=lambda alert: (order.index(alert.kind), alert.engine)))


def _of_chain(view: ChainView) -> Iterator[Alert]:
    if view.trouble:
        yield Alert(AlertKind.STORE, "", view.trouble)
    if view.doubt:
        yield Alert(AlertKind.HISTORY, "", f"the history was read again: {view.doubt}")
    if lost := view.lost:
        some = ", ".join(map(str, lost[:8])) + (" and others" if lost[8:] else "")
        message = f"manifests are missing, damaged or not trusted: versions {some}"
        yield Alert(AlertKind.HISTORY, "", message)


def _of_replica(
    view: ChainView, report: ReplicaReport, limits: HealthLimits, newest: Version | None, now: float
) -> Iterator[Alert]:
    engine = report.engine
    since_s = now - report.answered_at if report.answered_at is not None else None
    most_s = inf if limits.silence_s is None else limits.silence_s
    if report.trouble or (since_s is not None and since_s > most_s):
        when = "never answered" if since_s is None else f"answered {since_s:.0f} s ago"
        yield Alert(AlertKind.SILENT, engine, f"{when}: {report.trouble or 'no answer since'}")
    if since_s is None:
        return
    if other := _another_chain(view, report):
        yield Alert(AlertKind.ANOTHER_CHAIN, engine, other)
        return
    status = report.status
    told: dict[AlertKind, str] = {}
    for health, why in complaints(status, limits, newest=newest):
        if (kind := KINDS.get(health)) is not None:
            told.setdefault(kind, why)
    for kind, why in told.items():
        message = why or status.trouble or "it gives no reason"
        if kind is AlertKind.BEHIND:
            message = f"holds version {status.version}, {why}: version {newest}"
        yield Alert(kind, engine, message)


def _another_chain(view: ChainView, report: ReplicaReport) -> str:
    if view.chain and report.status.chain and report.status.chain != view.chain:
        return f"follows chain {report.status.chain}, expected {view.chain}"
    version, manifest = report.status.version, report.status.manifest
    row = view.at(version)
    if row is not None and manifest and manifest != row.manifest:
        return (
            f"holds version {version} with manifest {manifest[:16]}, expected {row.manifest[:16]}"
        )
    if _lies(view, report):
        return f"names version {max(_named(report))}, the newest in {view.url} is {view.newest}"
    return ""


def _counts(view: ChainView, report: ReplicaReport) -> bool:
    return report.status.chain == view.chain and not _lies(view, report)


def _lies(view: ChainView, report: ReplicaReport) -> bool:
    """Return whether a replica names a version that the store does not have, asked later."""
    numbers = _named(report)
    if view.newest is None or view.looked_at is None or report.answered_at is None or not numbers:
        return False
    return view.looked_at > report.answered_at and max(numbers) > view.newest and not view.trouble


def _named(report: ReplicaReport) -> list[Version]:
    return [one for one in (report.status.version, report.status.head) if one is not None]


logger = logging.getLogger(__name__)

ASKED_S: Final = 2.0  # seconds between two questions to a replica


@dataclass(frozen=True, slots=True)
class Overview:
    time: float
    view: ChainView
    reports: tuple[ReplicaReport, ...]
    newest: int | None  # that the store or a replica has shown
    alerts: tuple[Alert, ...]  # what is wrong, most urgent first
    phases: int  # revision of the phase times of replicas


class Watcher(Closeable):
    """Reads a chain and asks replicas, each in a thread of its own, so that none delays another."""

    def __init__(  # noqa: PLR0913 - each is a setting of its own
        self,
        index: ChainIndex,
        clients: Sequence[ReplicaClient] = (),
        *,
        boards: Sequence[PresenceBoard] = (),
        names: Sequence[Roster] = (),
        poll_s: float,
        asked_s: float = ASKED_S,
        limits: HealthLimits | None = None,
    ) -> None:
        self._index = index
        self._clients = tuple(clients)
        self._boards, self._names = tuple(boards), tuple(names)
        self._limits = limits or HealthLimits(lag=MAX_LAG)
        self._reports = {client.url: ReplicaReport(engine=client.url) for client in clients}
        if len(self._reports) < len(clients):
            raise ConfigError("a replica is named twice", hint="name each engine once")
        self._present: dict[str, Mapping[str, ReplicaReport]] = {}
        self.track, self.phases = FleetTrack(), PhaseTrack()
        self._stop = Event()
        self._run("chain", lambda: index.refresh(time.time()), poll_s)
        for client in clients:
            self._run(client.url, partial(self._ask, client), asked_s)
        for board in boards:
            self._run(board.url, partial(self._read, board), asked_s)
        for roster in names:
            self._run(roster.engines[0], partial(self._ask_all, roster), asked_s)
        if clients or boards or names:
            self._run("track", self._note, asked_s)

    @property
    def view(self) -> ChainView:
        return self._index.view

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(report.engine for report in self._every())

    def overview(self) -> Overview:
        now, view, reports = time.time(), self._index.view, self._every()
        newest = newest_known(view, reports)
        found = alerts(view, reports, self._limits, now)
        return Overview(now, view, reports, newest, found, self.phases.revision)

    def close(self) -> None:
        """End all threads, without waiting for a replica or store that hangs; idempotent."""
        self._stop.set()
        for client in self._clients:
            client.close()
        for other in (*self._boards, *self._names):
            other.close()

    def _every(self) -> tuple[ReplicaReport, ...]:
        every = dict(self._reports)
        for found in list(self._present.values()):
            every = {**every, **found, **self._reports}  # who is named twice is shown once
        return tuple(every.values())

    def _run(self, name: str, work: Callable[[], object], pause_s: float) -> None:
        def repeat() -> None:
            while not self._stop.is_set():
                try:
                    work()
                except Exception:
                    if self._stop.is_set():  # a client that was closed in the middle
                        return
                    logger.exception("the dashboard cannot read %s", name)
                self._stop.wait(pause_s)

        thread = Thread(target=repeat, name=f"deltachain-dashboard-{name}", daemon=True)
        if not started(thread):
            raise ConfigError(
                "no thread is left to watch the chain and each replica",
                hint="let this process have more (ulimit -u), or name fewer engines",
            )

    def _ask(self, client: ReplicaClient) -> None:
        try:
            report = answered(client.url, client.status(), time.time())
            self.phases.add(client.url, report.status.manifest or "", report.status.phases)
        except ControlPlaneError as exc:
            report = replace(self._reports[client.url], trouble=trouble(client.url, exc))
        self._reports[client.url] = report

    def _read(self, board: PresenceBoard) -> None:
        try:
            found, is_read = board.look(), True
        except DeltaChainError as exc:
            found, is_read = {board.url: exc}, isinstance(exc, ControlPlaneError)  # it is empty
        self._show(board.url, found, is_whole=is_read)

    def _ask_all(self, roster: Roster) -> None:
        (name,) = roster.engines
        found = dict(roster.ask(ReplicaClient.status))
        self._show(name, found, is_whole=name not in found)

    def _show(self, source: str, found: Mapping[str, ReplicaAnswer], *, is_whole: bool) -> None:
        """Show the answers of a board or a name; unless these are whole, older ones stay."""
        before, now = self._present.get(source, {}), time.time()
        reports = {} if is_whole else dict(before)
        for name, answer in found.items():
            report = seen(name, answer, now)
            if report.answered_at is None and name in before:
                report = replace(before[name], trouble=report.trouble)
            self.phases.add(name, report.status.manifest or "", report.status.phases)
            reports[name] = report
        self._present[source] = reports

    def _note(self) -> None:
        found = self.overview()
        oldest = found.time - (self._limits.silence_s or inf)
        held = {
            report.engine: None
            if report.trouble or (report.answered_at or 0.0) < oldest
            else report.status.version
            for report in found.reports
        }
        self.track.add(Moment(found.time, found.newest, held))
