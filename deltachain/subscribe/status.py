"""Status of a subscriber."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from deltachain.chain.heartbeat import check_age
from deltachain.errors import ChainError, MirrorLagsError, ObjectNotFoundError
from deltachain.redact import redacted_url
from deltachain.status import HealthLimits, Status, judged, lag
from deltachain.subscribe.history import check_standing
from deltachain.version import __version__

if TYPE_CHECKING:
    from deltachain.subscribe.subscriber import Subscriber

NOTHING_HELD = "it holds no version of the chain"
"""Why something that follows a chain is not ready before its first version."""


def known_status(subscriber: Subscriber, **others: Any) -> Status:  # noqa: ANN401 - its fields
    """Return the status of a subscriber from memory, before its readiness is judged.

    Args:
        subscriber: The subscriber.
        others: Fields of the status that its owner knows better.
    """
    chain, held, last = subscriber.opened, subscriber.held, subscriber.last
    times, doubt = subscriber.times, subscriber.watch.doubt
    version, head = held.version if held else None, chain.latest if chain else None
    committed_at = times.commit_of(held.manifest) if held else None
    fields: dict[str, Any] = {
        "url": chain.store.url if chain else redacted_url(subscriber.config.url),
        "chain": chain.identity.chain if chain else None,
        "version": version,
        "manifest": held.manifest if held else None,
        "state": held.state if held else None,
        "head": head,
        "lag_versions": lag(others.get("head", head), version),
        "ready": True,
        "reason": "",
        "pinned": subscriber.pinned,
        "poisoned": subscriber.poisoned,
        "doubt": str(doubt.args[0]) if doubt else "",
        "last": msgspec.to_builtins(last) | {"state": str(last.state)} if last else None,
        "phases": last.phases if last else {},
        "deltachain": __version__,
        "looked_at": times.looked_at,
        "applied_at": times.applied_at,
        "committed_at": committed_at,
        "silence_s": times.silence_s,
        "age_s": None if committed_at is None else max(0.0, time.time() - committed_at),
    }
    return Status(**fields | others)


def status_of(subscriber: Subscriber) -> Status:
    """Read the current head of the store, and return the status of a subscriber."""
    chain, held = subscriber.chain, subscriber.held
    head, doubt = chain.head(), subscriber.watch.doubt
    try:
        if held is not None:
            with suppress(MirrorLagsError):  # it was proven from a store that is ahead of this one
                check_standing(chain, held)
        if head is not None:
            check_age(chain, head)
    except (ChainError, ObjectNotFoundError) as exc:
        doubt = exc
    found = known_status(
        subscriber,
        head=head.version if head else None,
        doubt=str(doubt.args[0]) if doubt else "",
    )
    return judged(found, HealthLimits(silence_s=None), "" if held else NOTHING_HELD)
