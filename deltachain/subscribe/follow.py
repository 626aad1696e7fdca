"""Following a chain: the loop that applies what is committed, and heals by itself."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from threading import Event
from typing import TYPE_CHECKING, Final

from deltachain.errors import (
    BaseMismatchError,
    BrokenChainError,
    ChainError,
    ChainMismatchError,
    ConfigError,
    DeltaChainError,
    ForkedChainError,
    FormatError,
    LeaderReplacedError,
    ObjectNotFoundError,
    TensorMismatchError,
    UnsupportedFormatError,
)
from deltachain.subscribe.receipt import ApplyReceipt

if TYPE_CHECKING:
    from deltachain.subscribe.subscriber import Subscriber

logger = logging.getLogger(__name__)

NEEDS_A_PERSON: Final = (
    ChainMismatchError,
    ConfigError,
    ForkedChainError,
    LeaderReplacedError,
    TensorMismatchError,
    UnsupportedFormatError,
)
"""What waiting does not cure: these end the loop."""

LOOK_BACK: Final = 16
"""Looks in a row that found nothing, after which one makes sure that the chain is still there."""

MOST_POLLS: Final = 32
"""Polls' worth of waiting after repeated failures, at most."""


def follow(
    subscriber: Subscriber,
    *,
    stop: Event,
    every_version: bool,
    looked: Callable[[DeltaChainError | None], None],
) -> Iterator[ApplyReceipt]:
    """Apply versions as they are committed, until ``stop`` is set.

    A store that is down, an object that is corrupt or gone, a target that somebody else wrote to:
    each is logged once and tried again, ever more slowly, and from nothing where the target's state
    is in doubt. What only a person can resolve is raised: a fork, another model, a newer format.
    """
    failures = idle = 0
    logged = ""
    while not stop.is_set():
        receipt = None
        try:
            receipt = _step(subscriber, every_version=every_version)
            idle = idle + 1 if receipt is None else 0
            if idle and (failures or idle % LOOK_BACK == 0):
                subscriber.chain.check_present()
            failures, logged = 0, ""
            looked(None)
        except NEEDS_A_PERSON:
            raise
        except DeltaChainError as exc:
            failures += 1
            looked(exc)
            if str(exc) != logged:
                logged = str(exc)
                logger.warning("following %s: %s", subscriber.config.url, exc)
        if receipt is not None:
            yield receipt
            if receipt.lag_versions > 0:
                continue  # there is more; otherwise that was the look of this turn
        _wait(subscriber, failures, stop)


def _step(subscriber: Subscriber, *, every_version: bool) -> ApplyReceipt | None:
    """One look for a new version, which asks the store one thing when there is none."""
    chain, held = subscriber.chain, subscriber.held
    if held is None:
        return subscriber.update()
    if subscriber.pinned:
        return None
    later = None
    try:
        later = chain.find(held.version + 1) if every_version else chain.later(held.version)
        return subscriber.update(later) if later else None
    except (FormatError, ObjectNotFoundError, BrokenChainError):
        if later and later.version == chain.newest(held.version):
            raise
        return subscriber.update()  # no way leads there; one may lead to a later version
    except (ChainError, BaseMismatchError):
        there = subscriber.version
        if not _was_rolled_back(subscriber) and (there is None or there <= held.version):
            raise
        return None  # somebody else has rolled back, or applied it, meanwhile


def _was_rolled_back(subscriber: Subscriber) -> bool:
    return subscriber.pinned and not subscriber.poisoned


def _wait(subscriber: Subscriber, failures: int, stop: Event) -> None:
    """Wait for the next poll, longer after each failure, or until told or stopped."""
    wait_s = subscriber.poll_s * min(2 ** min(failures, 8), MOST_POLLS)
    wait_s *= random.uniform(0.75, 1.25)  # noqa: S311 - spreads replicas, guards nothing
    if not stop.is_set() and subscriber.told.wait(wait_s):
        subscriber.told.clear()
