"""Status of whatever follows a chain, and the one rule that says whether it is healthy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:  # imports numpy, which `deltachain fleet` does without
    from deltachain.types import Version


class Answer(msgspec.Struct, frozen=True):
    """Base of server replies; unknown fields of newer servers are ignored: fleets mix versions."""


class Status(Answer, frozen=True, kw_only=True):
    url: str
    chain: str | None  # id of the chain; null before the chain exists
    version: int | None  # version held; null if none can be proven
    head: int | None  # newest version seen in the store or announced by a publisher
    # head - version; null if the head seen is older than the held version.
    lag_versions: int | None
    ready: bool
    reason: str  # reason for not being ready; empty if ready
    # blake3 of the held version's manifest. Two replicas with equal versions and different
    # manifests follow different histories.
    manifest: str | None = None
    state: str | None = None  # state digest of the held version
    following: bool = True  # whether it applies versions automatically
    paused: bool = False  # whether a caller, or another client of its engine, paused it
    pinned: bool = False  # whether a rollback keeps it at its version
    # Whether it cannot prove the version it holds; an engine then generates nothing.
    poisoned: bool = False
    trouble: str = ""  # error since the last apply; empty for none
    # Reason why the held version may no longer be the chain's: the store went back, has another
    # history, or is lost.
    doubt: str = ""
    # Reason why it needs an operator: its engine is dead or does not answer, another leader has
    # attached, or following has ended; empty for none.
    fault: str = ""
    # Staged version, which an update to it swaps at once; null for none.
    staged: int | None = None
    classes: dict[str, dict[str, int]] = {}  # numbers of tensors and bytes, by class
    # Some of the tensors that are not written in place, with the reasons.
    on_host: dict[str, str] = {}
    ranks: list[dict[str, Any]] = []  # replies of the ranks to the last swap
    last: dict[str, Any] | None = None  # receipt of the last apply
    # Seconds of each phase of the version applied last, by name: diff, encode and
    # upload (a part of it) of the publisher; look from the commit on, fetch, stage,
    # pause and swap (a part of it) here.
    phases: dict[str, float] = {}
    # Version of deltachain; empty from replicas without this field, as are the next.
    deltachain: str = ""
    engine: str = ""  # name and version of the engine, such as vllm/0.32.0
    # Time at which the store last answered, in seconds since 1970, on its own clock; null before.
    looked_at: float | None = None
    applied_at: float | None = None  # time of the last swap, likewise; null before
    # Time of the held version's commit, likewise, on the publisher's clock; null if it is not
    # known.
    committed_at: float | None = None
    # Seconds since the store last answered, whatever the clock was set to meanwhile; 0 while
    # objects are fetched and requests for them are answered.
    silence_s: float | None = None
    # Seconds since the held version's commit; the difference of both clocks is part of it.
    age_s: float | None = None


def lag(head: Version | None, held: Version | None) -> int | None:
    """Return the versions behind the head; ``None`` if the head is older than the held version."""
    return None if head is None or held is None or head < held else head - held


Health: TypeAlias = Literal[
    "failed",
    "silent",
    "poisoned",
    "in doubt",
    "cut off",
    "stale",
    "not ready",
    "behind",
    "pinned",
    "ready",
]
"""Health of a replica, worst first. ``failed`` and ``silent`` include those that do not answer."""

SERVING: Final[frozenset[Health]] = frozenset(("behind", "pinned", "ready"))
"""Health of replicas that should get requests."""

MAX_SILENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthLimits:
    lag: int | None = None  # largest lag, in versions; None for any
    # Largest time without an answer of the store, or of the replica itself, in seconds; None
    # for any.
    silence_s: float | None = MAX_SILENCE_S


def complaints(
    status: Status,
    limits: HealthLimits,
    *,
    newest: Version | None = None,
    doubts: Iterable[str] = (),
) -> list[tuple[Health, str]]:
    """Return health and reason of everything that speaks against a replica, the worst first.

    The only rule of health: readiness, ``fleet`` and the dashboard ask it, and the alert rules of
    Prometheus are tested against it.
    """
    known = status.head if newest is None else newest
    behind = 0 if status.pinned else lag(known, status.version) or 0
    silence = _silence(status, limits.silence_s)
    sees_less = behind and not silence and status.head is not None and status.head != known
    found: list[tuple[Health, str, object]] = [
        ("failed", status.fault, status.fault),
        ("poisoned", "poisoned: it cannot prove what it holds", status.poisoned),
        *(("in doubt", doubt, doubt) for doubt in (status.doubt, *doubts)),
        ("cut off", silence, silence),
        ("stale", f"{behind} versions behind", limits.lag is not None and behind > limits.lag),
        ("not ready", status.reason, not status.ready),
        (
            "behind",
            f"it has seen version {status.head} as the newest, others {known}" if sees_less else "",
            behind,
        ),
        ("pinned", "", status.pinned),
    ]
    return [(health, why) for health, why, holds in found if holds]


def _silence(status: Status, most_s: float | None) -> str:
    silent_s = status.silence_s or 0.0
    if most_s is None or silent_s <= most_s or not status.following or status.pinned:
        return ""
    return f"its store has not answered for {silent_s:.0f} s, more than {most_s:g} s"


def judged(status: Status, limits: HealthLimits, waits: str) -> Status:
    waiting = msgspec.structs.replace(status, ready=not waits, reason=waits)
    found = [one for one in complaints(waiting, limits) if one[0] not in SERVING]
    # What delays a replica says more than how far it is behind meanwhile.
    found.sort(key=lambda one: one[0] not in ("failed", "poisoned", "not ready"))
    reason = found[0][1] if found else ""
    return msgspec.structs.replace(status, ready=not reason, reason=reason)
