"""Following a chain: the loop that applies what is committed, and heals by itself."""

from __future__ import annotations

import logging
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
from deltachain.retry import Backoff
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

LOOK_BACK: Final = 8
"""Turns after which a follower looks again at what it holds."""

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
    failures = turns = 0
    logged = ""
    while not stop.is_set():
        receipt, is_sure = None, True
        turns += 1
        try:
            receipt = _step(subscriber, every_version=every_version)
            around, is_sure = _look_back(subscriber, is_due=turns % LOOK_BACK == 0 or failures > 0)
            receipt = receipt or around
            failures, logged = 0, ""
            if is_sure:
                looked(None)
        except NEEDS_A_PERSON as exc:
            subscriber.watch.ended(exc)
            raise
        except DeltaChainError as exc:
            failures += 1
            looked(exc)
            if str(exc) != logged:
                logged = str(exc)
                logger.warning("following %s: %s", subscriber.config.url, exc)
        if receipt is not None:
            yield receipt
        if receipt is None or receipt.lag_versions <= 0:  # else there is more, and no look was lost
            _wait(subscriber, failures, stop)


def _look_back(subscriber: Subscriber, *, is_due: bool) -> tuple[ApplyReceipt | None, bool]:
    """Look again at what is held, if that is due, and go around a gap behind it.

    Returns:
        What was applied, and whether what is held is known to be where it should be.
    """
    held, chain, watch = subscriber.held, subscriber.chain, subscriber.watch
    if held is None or not (is_due or chain.is_doubtful or watch.is_open(held)):
        return None, True
    try:
        return None, watch.look(chain, held)
    except BrokenChainError as exc:
        receipt = None if subscriber.pinned else _around(subscriber, exc)
        if receipt is None:
            raise
        return receipt, True


def _around(subscriber: Subscriber, exc: DeltaChainError) -> ApplyReceipt | None:
    """Go to the head by whichever way there is, and say so."""
    receipt = subscriber.update()
    if receipt is not None:
        logger.warning("%s; another way led to version %d", exc.args[0], receipt.version)
    return receipt


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
    except (FormatError, ObjectNotFoundError, BrokenChainError) as exc:
        if later and later.version == chain.newest(held.version):
            raise
        return _around(subscriber, exc)  # no way leads there; one may lead to a later version
    except (ChainError, BaseMismatchError):
        there = subscriber.version
        if not _was_rolled_back(subscriber) and (there is None or there <= held.version):
            raise
        return None  # somebody else has rolled back, or applied it, meanwhile


def _was_rolled_back(subscriber: Subscriber) -> bool:
    return subscriber.pinned and not subscriber.poisoned


def _wait(subscriber: Subscriber, failures: int, stop: Event) -> None:
    """Wait for the next poll, longer after each failure, or until told or stopped."""
    most_s = 1.25 * subscriber.poll_s  # with 0.4 of it random, one poll on average
    pauses = Backoff(most_s, most_s * MOST_POLLS, random_share=0.4)
    if not stop.is_set() and subscriber.told.wait(pauses.pause_s(failures)):
        subscriber.told.clear()
