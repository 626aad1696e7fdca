"""What a replica says of itself, whichever its engine."""

from __future__ import annotations

from typing import Any

import msgspec


class Answer(msgspec.Struct, frozen=True):
    """What a server answers. What a newer one says besides is passed over: fleets mix versions."""


class ReplicaStatus(Answer, frozen=True, kw_only=True):
    """What a replica says of itself.

    Attributes:
        url: Where its chain lies.
        chain: Id of that chain; null before it is there.
        version: The version held; null for nothing that can be proven.
        manifest: blake3 of its manifest; null as well from replicas that do not say.
        state: Its state digest.
        staged: The version that an ``update`` to it would swap at once; null for none.
        head: The newest version that this replica has seen.
        lag_versions: ``head - version``; null where the head seen lies before what is held.
        ready: Whether it should be sent requests.
        reason: Why not.
        following: Whether it applies versions by itself.
        paused: Whether somebody paused it.
        pinned: Whether a rollback keeps it where it is.
        poisoned: Whether it cannot prove what it holds. It then generates nothing.
        classes: Tensors and bytes by the way they reach live weights.
        on_host: Some of those that are not written in place, and why.
        ranks: What each rank said at the last swap.
        last: The last apply.
        trouble: What went wrong since.
        doubt: Why what is held may not be the chain's any more: the store went back, has another
            history, or is lost. Such a replica is not ready.
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
