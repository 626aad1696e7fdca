"""Alerts: what is wrong with a chain or its replicas, as a pure function of what is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final

from deltachain.dashboard.chain_index import ChainView
from deltachain.dashboard.replica_report import ReplicaReport
from deltachain.status import Health, HealthLimits, complaints
from deltachain.types import Version


class AlertKind(StrEnum):
    """What an alert is about, most urgent first."""

    STORE = "store"
    HISTORY = "history"
    ANOTHER_CHAIN = "another chain"
    SILENT = "silent"
    CUT_OFF = "cut off"
    NOT_READY = "not ready"
    BEHIND = "behind"


@dataclass(frozen=True, slots=True)
class Alert:
    """One thing that is wrong.

    Attributes:
        kind: What it is about.
        engine: Address of the replica; empty for the chain.
        message: What was expected and what was found.
    """

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
"""Alerts by the health that they tell."""

MAX_LAG: Final = 8
"""Largest lag without an alert, in versions, by default."""


def newest_known(view: ChainView, reports: Iterable[ReplicaReport]) -> Version | None:
    """Return the newest version that the store or a replica has shown; ``None`` for none.

    A replica counts only until the store was asked after its answer: what it names must be there.
    """
    heads = [view.newest, *(report.status.head for report in reports if _counts(view, report))]
    return max((head for head in heads if head is not None), default=None)


def alerts(
    view: ChainView, reports: Iterable[ReplicaReport], limits: HealthLimits, now: float
) -> tuple[Alert, ...]:
    """Return all alerts, most urgent first.

    Args:
        view: The chain.
        reports: Its replicas.
        limits: Limits of lag and silence.
        now: Time in seconds since 1970.
    """
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
    view: ChainView,
    report: ReplicaReport,
    limits: HealthLimits,
    newest: Version | None,
    now: float,
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
    told: set[AlertKind] = set()
    for health, why in complaints(status, limits, newest=newest):
        kind = KINDS.get(health)
        if kind is None or kind in told:
            continue
        told.add(kind)
        message = why or status.trouble or "it gives no reason"
        if kind is AlertKind.BEHIND:
            message = f"holds version {status.version}, {why}: version {newest}"
        yield Alert(kind, engine, message)


def _another_chain(view: ChainView, report: ReplicaReport) -> str:
    """Return how a replica's history differs from the chain's; empty if it does not."""
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
