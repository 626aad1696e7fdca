"""Report of a replica: its last answer, and when it was asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from deltachain.control.client.roster import ReplicaAnswer
from deltachain.dashboard.phases import replica_phases
from deltachain.errors import DeltaChainError
from deltachain.redact import printable
from deltachain.replica.status import ReplicaStatus
from deltachain.types import Version

LARGEST: Final = (1 << 53) - 1
"""Largest number that a browser holds exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """What is known of one replica. Its texts are cut; numbers out of range count as unknown.

    Attributes:
        engine: Its address, or the URL of its record on a board.
        answered_at: Time of its last answer, or at which it wrote its record, in seconds since 1970
            on the dashboard's clock; ``None`` before the first.
        trouble: Why it did not answer the last time; empty if it did.
        url: URL of the chain it follows; this and all that follows as of its last answer.
        chain: Id of the chain.
        version: Version it holds; ``None`` if it can prove none.
        manifest: blake3 of this version's manifest.
        head: Newest version it has seen.
        ready: Whether it is ready for requests.
        reason: Why it is not.
        error: Its error since the last apply, or its doubt about the version it holds.
        pinned: Whether a rollback keeps it at its version.
        following: Whether it looks for new versions by itself.
        silence_s: Seconds since its store last answered it; ``None`` if it does not say.
        deltachain: Its version of deltachain.
        software: Name and version of its engine.
        phases: Seconds of the phases of its last apply, if that was the version it holds, by name.
    """

    engine: str
    answered_at: float | None = None
    trouble: str = ""
    url: str = ""
    chain: str = ""
    version: Version | None = None
    manifest: str = ""
    head: Version | None = None
    ready: bool = False
    reason: str = ""
    error: str = ""
    pinned: bool = False
    following: bool = False
    silence_s: float | None = None
    deltachain: str = ""
    software: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)


def answered(engine: str, status: ReplicaStatus, now: float) -> ReplicaReport:
    """Return the report of a replica that answered."""
    silence_s, applied = status.silence_s, (status.last or {}).get("version")
    return ReplicaReport(
        engine=engine,
        answered_at=now,
        url=printable(status.url),
        chain=printable(status.chain or ""),
        version=_number(status.version),
        manifest=printable(status.manifest or ""),
        head=_number(status.head),
        ready=status.ready,
        reason=printable(status.reason),
        error=printable(status.doubt or status.trouble),
        pinned=status.pinned,
        following=status.following,
        silence_s=silence_s if silence_s is not None and 0 <= silence_s < LARGEST else None,
        deltachain=printable(status.deltachain),
        software=printable(status.engine),
        phases=replica_phases(status.phases) if applied == status.version else {},
    )


def seen(engine: str, found: ReplicaAnswer, now: float) -> ReplicaReport:
    """Return the report of a replica that was asked beside others, or whose presence was read."""
    if isinstance(found, DeltaChainError):
        return ReplicaReport(engine=engine, trouble=trouble(engine, found))
    if isinstance(found, ReplicaStatus):
        return answered(engine, found, now)
    report = answered(engine, found.status, now - found.age_s)
    return replace(report, trouble=printable(f"it ended: {found.ended}")) if found.ended else report


def trouble(engine: str, exc: DeltaChainError) -> str:
    """Return why a replica did not answer, without its address."""
    said = str(exc.args[0]) if exc.args else type(exc).__name__
    return printable(said.removeprefix(engine).strip(": ").removeprefix("did not answer: "))


def _number(value: int | None) -> Version | None:
    return value if value is not None and 0 <= value <= LARGEST else None
