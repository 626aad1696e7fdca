"""Summary of a leader for operators: its status, from memory alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from deltachain.errors import BrokenChainError
from deltachain.redact import redacted_url
from deltachain.replica.messages import status_row
from deltachain.replica.readiness import Condition, why_unready
from deltachain.replica.status import ReplicaStatus
from deltachain.subscribe.receipt import ApplyReceipt
from deltachain.subscribe.status import lag
from deltachain.version import __version__

if TYPE_CHECKING:
    from deltachain.replica.leader import Leader


def summarise(leader: Leader) -> ReplicaStatus:
    """Return the status of a replica; makes no request to the store or the engine."""
    subscriber, target = leader.subscriber, leader.target
    held, chain, times = subscriber.held, subscriber.opened, subscriber.times
    version, newest, last = held.version if held else None, leader.newest, subscriber.last
    doubt = doubt_of(leader)
    condition = Condition(
        version=version,
        newest=newest,
        poisoned=subscriber.poisoned,
        released=leader.released,
        paused=target.why_paused,
        doubt=doubt,
        ended=leader.ended,
        pinned=subscriber.pinned,
        caught_up=leader.caught_up,
        follows=leader.settings.follow,
        silence_s=times.silence_s,
        max_lag=leader.settings.max_lag,
        max_silence_s=leader.settings.max_silence_s,
        fault=leader.engine_watch.fault,
    )
    reason = why_unready(condition)
    committed_at = times.commit_of(held.manifest) if held else None
    return ReplicaStatus(
        url=redacted_url(leader.settings.subscribe.url),
        chain=chain.identity.chain if chain else None,
        version=version,
        state=held.state if held else None,
        staged=leader.staged.to.version if leader.staged else None,
        head=newest,
        lag_versions=lag(newest, version),
        ready=not reason,
        reason=reason,
        following=leader.settings.follow and not leader.ended,
        paused=bool(condition.paused),
        pinned=subscriber.pinned,
        poisoned=subscriber.poisoned,
        classes=target.classes(),
        on_host=target.on_host(),
        ranks=[status_row(reply) for reply in target.ranks],
        last=None if last is None else _plain(last),
        trouble=str(leader.trouble) if leader.trouble else "",
        manifest=held.manifest if held else None,
        doubt=doubt,
        fault=condition.fault or leader.ended,
        phases=last.phases if last else {},
        deltachain=__version__,
        engine=leader.engine.software,
        looked_at=times.looked_at,
        applied_at=times.applied_at,
        committed_at=committed_at,
        silence_s=condition.silence_s,
        age_s=None if committed_at is None else max(0.0, time.time() - committed_at),
    )


def doubt_of(leader: Leader) -> str:
    """Return why the held version may not be the chain's; empty if there is no doubt.

    A pinned replica ignores lost manifests.
    """
    subscriber = leader.subscriber
    doubt = subscriber.watch.doubt
    if doubt is None or (subscriber.pinned and isinstance(doubt, BrokenChainError)):
        return ""
    return str(doubt.args[0])


def _plain(receipt: ApplyReceipt) -> dict[str, Any]:
    found: Mapping[str, Any] = msgspec.to_builtins(receipt)
    return {**found, "state": str(receipt.state)}
