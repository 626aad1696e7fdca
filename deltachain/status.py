"""Status of whatever follows a chain, and the one rule that says whether it is healthy."""

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
    lag_versions: int | None  # null if the head seen is older than the held version
    ready: bool
    reason: str  # reason for not being ready; empty if ready
    manifest: str | None = None  # blake3; it differs where replicas follow different histories
    state: str | None = None  # state digest of the held version
    following: bool = True  # whether it applies versions automatically
    paused: bool = False  # whether a caller, or another client of its engine, paused it
    pinned: bool = False  # whether a rollback keeps it at its version
    poisoned: bool = False  # it cannot prove its version; an engine then generates nothing
    trouble: str = ""  # error since the last apply; empty for none
    doubt: str = ""  # why the held version may no longer be the chain's
    fault: str = ""  # why it needs an operator: its engine is dead, following has ended...
    staged: int | None = None  # version that an update swaps at once
    oldest: int | None = None  # no request reads keys and values of an older one; null if unknown
    classes: dict[str, dict[str, int]] = {}  # numbers of tensors and bytes, by class
    on_host: dict[str, str] = {}  # reasons why some tensors are not written in place
    ranks: list[dict[str, Any]] = []  # replies of the ranks to the last swap
    draft: dict[str, Any] | None = None  # url, version, head and trouble of a draft with a chain
    last: dict[str, Any] | None = None  # receipt of the last apply
    # Seconds of phases of the last version: diff, encode and upload (a part of it) of the
    # publisher; here look, from the commit on, fetch, stage, pause and swap (a part of it).
    phases: dict[str, float] = {}
    deltachain: str = ""  # its version
    engine: str = ""  # name and version of the engine, such as vllm/0.32.0
    looked_at: float | None = None  # last answer of the store, in seconds since 1970, here
    applied_at: float | None = None  # time of the last swap, likewise; null before
    committed_at: float | None = None  # of the held version, on the publisher's clock
    silence_s: float | None = None  # since the store's last answer; 0 while it sends objects
    age_s: float | None = None  # since the held version's commit, by both clocks


def lag(head: "Version | None", held: "Version | None") -> int | None:
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
    silence_s: float | None = MAX_SILENCE_S  # of the store, or of the replica; None for any


def complaints(
    status: Status,
    limits: HealthLimits,
    *,
    newest: "Version | None" = None,
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
