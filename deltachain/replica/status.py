"""Status of a replica, the same for all engines."""

from __future__ import annotations

from typing import Any

import msgspec


class Answer(msgspec.Struct, frozen=True):
    """Base of server replies; unknown fields of newer servers are ignored: fleets mix versions."""


class ReplicaStatus(Answer, frozen=True, kw_only=True):
    """Status of a replica.

    Attributes:
        url: URL of its chain.
        chain: Id of the chain; null before the chain exists.
        version: Version held; null if none can be proven.
        manifest: blake3 of the held version's manifest; null too from replicas without this field.
        state: State digest of the held version.
        staged: Staged version, which an ``update`` to it swaps at once; null for none.
        head: Newest version that this replica has seen in the store or was told of by a publisher.
        lag_versions: ``head - version``; null if the head seen is older than the held version.
        ready: Whether the replica is ready for requests.
        reason: Reason for not being ready; empty if ready.
        following: Whether it applies versions automatically.
        paused: Whether a caller, or another client of its engine, paused it.
        pinned: Whether a rollback keeps it at its version.
        poisoned: Whether it cannot prove the version it holds; it then generates nothing.
        classes: Numbers of tensors and bytes, by class.
        on_host: Some of the tensors that are not written in place, with the reasons.
        ranks: Replies of the ranks to the last swap.
        last: Receipt of the last apply.
        phases: Seconds of each phase of the version applied last, by name: ``diff``, ``encode`` and
            ``upload`` (a part of it) of the publisher; ``look`` from the commit on, ``fetch``,
            ``stage``, ``pause`` and ``swap`` (a part of it) here.
        trouble: Error since the last apply; empty for none.
        doubt: Reason why the held version may no longer be the chain's: the store went back, has
            another history, or is lost. Such a replica is not ready.
        fault: Reason why it needs an operator: its engine is dead or does not answer, another
            leader has attached, or following has ended; empty for none.
        deltachain: Version of deltachain; empty from replicas without this field, as are the next.
        engine: Name and version of the engine, such as ``vllm/0.32.0``.
        looked_at: Time at which the store last answered, in seconds since 1970, on the replica's
            clock; null before.
        applied_at: Time of the last swap, likewise; null before.
        committed_at: Time of the held version's commit, likewise, on the publisher's clock; null if
            it is not known.
        silence_s: Seconds since the store last answered, whatever the clock was set to meanwhile;
            0 while objects are fetched and requests for them are answered.
        age_s: Seconds since the held version's commit; the difference of both clocks is part of it.
    """

    url: str
    chain: str | None
    version: int | None
    state: str | None
    staged: int | None
    head: int | None
    lag_versions: int | None
    ready: bool
    reason: str
    following: bool
    paused: bool
    pinned: bool
    poisoned: bool
    classes: dict[str, dict[str, int]]
    on_host: dict[str, str]
    ranks: list[dict[str, Any]]
    last: dict[str, Any] | None
    trouble: str
    manifest: str | None = None
    doubt: str = ""
    fault: str = ""
    deltachain: str = ""
    engine: str = ""
    looked_at: float | None = None
    applied_at: float | None = None
    committed_at: float | None = None
    silence_s: float | None = None
    age_s: float | None = None
    phases: dict[str, float] = {}
