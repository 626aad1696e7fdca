"""Alerts: what is wrong with a chain or its replicas, as a pure function of what is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from deltachain.dashboard.chain_index import ChainView
from deltachain.dashboard.replica_report import ReplicaReport
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertLimits:
    """Limits beyond which there is an alert.

    Attributes:
        max_lag: Largest lag, in versions.
        max_silence_s: Largest time without an answer of a replica, or of its store to it, in
            seconds.
    """

    max_lag: int = 8
    max_silence_s: float = 60.0


def newest_seen(view: ChainView, reports: Iterable[ReplicaReport]) -> Version | None:
    """Return the newest version that the store or a replica has shown; ``None`` for none.

    A replica counts only until the store was asked after its answer: what it names must be there.
    """
    heads = [view.newest, *(report.head for report in reports if _counts(view, report))]
    return max((head for head in heads if head is not None), default=None)


def alerts(
    view: ChainView, reports: Iterable[ReplicaReport], limits: AlertLimits, now: float
) -> tuple[Alert, ...]:
    """Return all alerts, most urgent first.

    Args:
        view: The chain.
        reports: Its replicas.
        limits: Limits of lag and silence.
        now: Time in seconds since 1970.
    """
    reports = tuple(reports)
    newest = newest_seen(view, reports)
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
    limits: AlertLimits,
    newest: Version | None,
    now: float,
) -> Iterator[Alert]:
    engine = report.engine
    since_s = now - report.answered_at if report.answered_at is not None else None
    if report.trouble or (since_s is not None and since_s > limits.max_silence_s):
        when = "never answered" if since_s is None else f"answered {since_s:.0f} s ago"
        yield Alert(AlertKind.SILENT, engine, f"{when}: {report.trouble or 'no answer since'}")
    if since_s is None:
        return
    if other := _another_chain(view, report):
        yield Alert(AlertKind.ANOTHER_CHAIN, engine, other)
        return
    looks = report.following and not report.pinned  # others have no reason to ask their store
    if looks and report.silence_s is not None and report.silence_s > limits.max_silence_s:
        message = f"its store has not answered it for {report.silence_s:.0f} s"
        yield Alert(AlertKind.CUT_OFF, engine, message)
    if not report.ready:
        reason = report.reason or report.error or "it gives no reason"
        yield Alert(AlertKind.NOT_READY, engine, reason)
    lag = lag_of(report, newest)
    if lag is not None and lag > limits.max_lag:
        message = f"holds version {report.version}, {lag} behind version {newest}"
        yield Alert(AlertKind.BEHIND, engine, message)


def lag_of(report: ReplicaReport, newest: Version | None) -> int | None:
    """Return how many versions a replica is behind; ``None`` if it is not known."""
    if newest is None or report.version is None:
        return None
    return max(newest - report.version, 0)


def _another_chain(view: ChainView, report: ReplicaReport) -> str:
    """Return how a replica's history differs from the chain's; empty if it does not."""
    if view.chain and report.chain and report.chain != view.chain:
        return f"follows chain {report.chain}, expected {view.chain}"
    row = view.at(report.version)
    if row is not None and report.manifest and report.manifest != row.manifest:
        return (
            f"holds version {report.version} with manifest {report.manifest[:16]}, "
            f"expected {row.manifest[:16]}"
        )
    if _lies(view, report):
        claimed = max(number for number in (report.version, report.head) if number is not None)
        return f"names version {claimed}, the newest in {view.url} is {view.newest}"
    return ""


def _counts(view: ChainView, report: ReplicaReport) -> bool:
    return report.chain == view.chain and not _lies(view, report)


def _lies(view: ChainView, report: ReplicaReport) -> bool:
    """Return whether a replica names a version that the store does not have, asked later."""
    numbers = [number for number in (report.version, report.head) if number is not None]
    if view.newest is None or view.looked_at is None or report.answered_at is None or not numbers:
        return False
    return view.looked_at > report.answered_at and max(numbers) > view.newest and not view.trouble
