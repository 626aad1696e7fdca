"""Comparison of all replicas of a fleet: who is behind, cut off or in doubt; pure functions."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, get_args

from deltachain.errors import DeltaChainError
from deltachain.presence.record import PresenceFound
from deltachain.status import Health, HealthLimits, Status, complaints
from deltachain.types import Version

from .roster import ReplicaAnswer

ALARMING: Final[frozenset[Health]] = frozenset(
    ("failed", "silent", "poisoned", "in doubt", "cut off", "stale")
)
"""What a fleet's exit code tells."""

WITNESSES: Final = 2
"""Number of replicas that must have seen a version that none holds, where at least three answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRow:
    engine: str  # its address
    health: Health
    why: tuple[str, ...]  # reasons; empty if it is ready
    lag: int | None  # versions behind the newest that any replica has seen; None if it holds none
    status: Status | None
    doubt: str = ""  # why what it holds may not be the chain's; empty if there is no doubt
    hint: str = ""  # what resolves its failure; empty if unknown
    written_s: float | None = None  # seconds since it wrote its presence, by the store's clock

    @property
    def is_alarming(self) -> bool:
        return self.health in ALARMING


def compare(answers: Mapping[str, ReplicaAnswer], limits: HealthLimits) -> list[ReplicaRow]:
    """Return a row for each replica, by address: the worst health first, then the largest lag."""
    there = {
        url: one.status if isinstance(one, PresenceFound) else one
        for url, one in answers.items()
        if not isinstance(one, DeltaChainError)
    }
    newest = {
        chain: newest_seen([one for one in there.values() if one.chain == chain])
        for chain in {one.chain for one in there.values()}
    }
    doubts = _doubts(there, newest)
    rows = []
    for url, answer in answers.items():
        if isinstance(answer, DeltaChainError):
            rows.append(_failed(url, answer))
            continue
        status = there[url]
        row = _row(url, status, newest[status.chain], doubts[url], limits)
        rows.append(_present(row, answer, limits) if isinstance(answer, PresenceFound) else row)
    order = get_args(Health)
    return sorted(rows, key=lambda row: (order.index(row.health), -(row.lag or 0), _natural(row)))


def _present(row: ReplicaRow, found: PresenceFound, limits: HealthLimits) -> ReplicaRow:
    """Return the row of a replica that wrote of itself, and may have ended since."""
    row = replace(row, written_s=found.age_s)
    if found.ended:
        return replace(row, health="failed", why=(f"it ended: {found.ended}", *row.why))
    if limits.silence_s is not None and found.age_s > limits.silence_s:
        gone = f"it has not written its presence for {found.age_s:.0f} s"
        hint = "start it again; if it is gone for good, remove its record"
        return replace(row, health="silent", why=(gone, *row.why), hint=hint)
    return row


def _natural(row: ReplicaRow) -> list[tuple[int, str]]:
    """Sort addresses as people do: ``r2`` before ``r10``."""
    words = re.split(r"(\d{1,9})", row.engine)
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in words]


def newest_seen(statuses: Sequence[Status]) -> Version | None:
    """Return the newest version that replicas hold or have seen; ``None`` for none.

    Where three or more answer, one alone is not believed to have seen a version that nobody holds.
    """
    heads = sorted((one.head for one in statuses if one.head is not None), reverse=True)
    held = [one.version for one in statuses if one.version is not None]
    believed = heads[WITNESSES - 1 :] if len(statuses) > WITNESSES else heads
    return max((*believed[:1], *held), default=None)


def _doubts(
    there: Mapping[str, Status], newest: Mapping[str | None, Version | None]
) -> dict[str, tuple[str, ...]]:
    chains = Counter(one.chain for one in there.values() if one.chain)
    manifests: dict[Version | None, Counter[str]] = {}
    for one in there.values():
        if one.manifest:
            manifests.setdefault(one.version, Counter())[one.manifest] += 1
    found = {}
    for url, one in there.items():
        said, known = [], newest[one.chain]
        if one.chain and _is_disputed(one.chain, chains):
            said.append(f"others follow another chain than {one.chain[:12]}")
        if one.manifest and _is_disputed(one.manifest, manifests[one.version]):
            said.append(f"others hold another version {one.version}")
        if one.head is not None and known is not None and one.head > known:
            said.append(f"it says that version {one.head} exists, which no other has seen")
        found[url] = tuple(said)
    return found


def _is_disputed(one: str, holders: Counter[str]) -> bool:
    """Return whether a chain, or the manifest of a version, is not what most replicas have."""
    most = max(holders.values())
    return holders[one] < most or list(holders.values()).count(most) > 1


def _failed(url: str, error: DeltaChainError) -> ReplicaRow:
    said = str(error.args[0]).removeprefix(url).strip(": ")
    return ReplicaRow(
        engine=url, health="failed", why=(said,), lag=None, status=None, hint=error.hint
    )


def _row(
    url: str, status: Status, newest: Version | None, doubts: Sequence[str], limits: HealthLimits
) -> ReplicaRow:
    trouble = status.trouble.partition("\n")[0]  # what resolves it is in the replica's own status
    found = complaints(status, limits, newest=newest, doubts=doubts)
    return ReplicaRow(
        engine=url,
        health=found[0][0] if found else "ready",
        why=tuple(dict.fromkeys(why for why in (*(why for _, why in found), trouble) if why)),
        lag=None if newest is None or status.version is None else max(0, newest - status.version),
        status=status,
        doubt=status.doubt or next(iter(doubts), ""),
    )
