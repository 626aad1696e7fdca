"""Report of a replica: its last answer, and when it was asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import msgspec

from deltachain.control.roster import ReplicaAnswer
from deltachain.dashboard.phases import replica_phases
from deltachain.errors import DeltaChainError
from deltachain.redact import printable
from deltachain.status import Status
from deltachain.types import Version

LARGEST: Final = (1 << 53) - 1
"""Largest number that a browser holds exactly."""


UNKNOWN: Final = Status(
    url="", chain=None, version=None, head=None, lag_versions=None, ready=False, reason=""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """What is known of one replica.

    Attributes:
        engine: Its address, or the URL of its record on a board.
        answered_at: Time of its last answer, or at which it wrote its record, in seconds since 1970
            on the dashboard's clock; ``None`` before the first.
        trouble: Why it did not answer the last time; empty if it did.
        status: Its last answer. Texts are cut; numbers out of range count as unknown.
    """

    engine: str
    answered_at: float | None = None
    trouble: str = ""
    status: Status = UNKNOWN


def answered(engine: str, status: Status, now: float) -> ReplicaReport:
    """Return the report of a replica that answered."""
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
    """Return why a replica did not answer, without its address."""
    said = str(exc.args[0]) if exc.args else type(exc).__name__
    return printable(said.removeprefix(engine).strip(": ").removeprefix("did not answer: "))


def _number(value: int | None) -> Version | None:
    return value if value is not None and 0 <= value <= LARGEST else None
