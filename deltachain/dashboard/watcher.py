"""Watcher: threads that keep a chain's index and the reports of its replicas up to date."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from threading import Event, Thread
from typing import Final

from typing_extensions import override

from deltachain.control.replica_client import ReplicaClient
from deltachain.control.roster import ReplicaAnswer, Roster
from deltachain.dashboard.alerts import MAX_LAG, Alert, alerts, newest_known
from deltachain.dashboard.chain_index import ChainIndex, ChainView
from deltachain.dashboard.phases import PhaseTrack
from deltachain.dashboard.replica_report import ReplicaReport, answered, seen, trouble
from deltachain.dashboard.track import FleetTrack, Moment
from deltachain.errors import ConfigError, ControlPlaneError, DeltaChainError
from deltachain.presence.board import PresenceBoard
from deltachain.status import HealthLimits
from deltachain.threads import Closeable, started

logger = logging.getLogger(__name__)

ASKED_S: Final = 2.0
"""Seconds between two questions to a replica."""


@dataclass(frozen=True, slots=True)
class Overview:
    """A chain and its replicas at one moment.

    Attributes:
        time: The time, in seconds since 1970.
        view: The chain.
        reports: The replicas, in the order in which they were named.
        newest: The newest version that the store or a replica has shown; ``None`` for none.
        alerts: What is wrong, most urgent first.
        phases: Revision of the phase times of replicas.
    """

    time: float
    view: ChainView
    reports: tuple[ReplicaReport, ...]
    newest: int | None
    alerts: tuple[Alert, ...]
    phases: int


class Watcher(Closeable):
    """Reads a chain and asks replicas, each in a thread of its own, so that none delays another.

    Args:
        index: Index of the chain.
        clients: Clients of the replicas, which the watcher closes.
        boards: Boards of further replicas, which can be read only; the watcher closes them too, as
            the next.
        names: Rosters of one DNS name each, which is looked up again in every round.
        poll_s: Seconds between two looks at the chain.
        asked_s: Seconds between two questions to a replica.
        limits: Limits of alerts.

    Attributes:
        track: Versions of the replicas over time.
        phases: Phase times of the versions that replicas applied.

    Raises:
        ConfigError: A replica is named twice.
    """

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
        self._run("chain", self._look, poll_s)
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
        """What is known of the chain now."""
        return self._index.view

    @property
    def engines(self) -> tuple[str, ...]:
        """Addresses of the replicas, and URLs of their records on boards."""
        return tuple(report.engine for report in self._every())

    def overview(self) -> Overview:
        """Return what is known now, without asking anybody."""
        now, view, reports = time.time(), self._index.view, self._every()
        newest = newest_known(view, reports)
        found = alerts(view, reports, self._limits, now)
        return Overview(now, view, reports, newest, found, self.phases.revision)

    @override
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
        """Repeat work in a thread until the watcher is closed."""

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

    def _look(self) -> None:
        self._index.refresh(time.time())

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
        """Show what a board or a name has now.

        Args:
            source: URL of the board, or the name.
            found: What is known of each replica, and what is wrong with the source.
            is_whole: Whether these are all; else those of before stay, as old as they are.
        """
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
