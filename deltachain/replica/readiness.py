"""Readiness of a replica for requests: a pure function of its condition."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from deltachain.types import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Everything that decides whether a replica is ready for requests.

    Attributes:
        version: Version held; ``None`` for none.
        newest: Newest version that the replica has seen or was told of; ``None`` for none.
        poisoned: Whether it cannot prove the version it holds.
        released: Kinds of memory that the engine has released.
        paused: Why generation is paused; empty if it is not.
        doubt: Reason why the held version may not be the chain's; empty for none.
        ended: Reason why it follows no more; empty if it does, or never did.
        pinned: Whether a rollback keeps it at its version, however old that is.
        caught_up: Whether it was at the head once.
        follows: Whether it looks for new versions by itself.
        silence_s: Seconds since its store last answered.
        max_lag: Largest lag of a ready replica, in versions; ``None`` for any.
        max_silence_s: Largest ``silence_s`` of a ready replica that follows; ``None`` for any.
        fault: Why its engine cannot be relied upon; empty if it can.
    """

    version: Version | None
    newest: Version | None
    poisoned: bool
    released: Collection[str]
    paused: str
    doubt: str
    ended: str
    pinned: bool
    caught_up: bool
    follows: bool
    silence_s: float
    max_lag: int | None
    max_silence_s: float | None
    fault: str = ""


def why_unready(now: Condition) -> str:
    """Return why a replica is not ready for requests; empty if it is ready."""
    if now.fault or now.poisoned:
        return now.fault or "poisoned: it cannot prove what it holds"
    if now.version is None:
        return "it holds no version of the chain"
    if now.released:
        return f"asleep: the engine has released its {', '.join(sorted(now.released))}"
    if now.paused:
        return now.paused
    if now.doubt or now.ended or now.pinned:
        return now.doubt or now.ended
    return _why_behind(now, now.version)


def _why_behind(now: Condition, version: Version) -> str:
    if not now.caught_up:
        return "it has not caught up yet"
    behind = (now.newest or 0) - version
    if now.max_lag is not None and behind > now.max_lag:
        return f"{behind} versions behind"
    most_s = now.max_silence_s
    if most_s is not None and now.follows and now.silence_s > most_s:
        return f"its store has not answered for {now.silence_s:.0f} s, more than {most_s:g} s"
    return ""
