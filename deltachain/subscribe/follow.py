"""The follow loop: applies versions as they are committed, and recovers from failures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from threading import Event
from typing import TYPE_CHECKING, Final

from deltachain.chain.heartbeat import check_age
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
    MirrorLagsError,
    ObjectNotFoundError,
    TensorMismatchError,
    UnsupportedFormatError,
)
from deltachain.retry import between_polls
from deltachain.subscribe.announcements import Announcements
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
"""Errors that need an operator; they end the loop."""

LOOK_BACK: Final = 8
"""Poll intervals between two checks of the held version in the store."""


def follow(
    subscriber: Subscriber,
    *,
    stop: Event,
    every_version: bool,
    looked: Callable[[DeltaChainError | None], None],
) -> Iterator[ApplyReceipt]:
    """Apply versions as they are committed, until ``stop`` is set.

    An unavailable store, a corrupt or missing object and a target that was modified externally are
    logged once and retried with back-off, from nothing if the target's state is unknown. Errors
    that need an operator are raised: a fork, another model, a newer format.
    """
    with Announcements(subscriber.store, subscriber.notify) as announcements:
        yield from _follow(
            subscriber, announcements, stop, every_version=every_version, looked=looked
        )


def _follow(
    subscriber: Subscriber,
    announcements: Announcements,
    stop: Event,
    *,
    every_version: bool,
    looked: Callable[[DeltaChainError | None], None],
) -> Iterator[ApplyReceipt]:
    failures = polls = 0  # polls since the last look back, as many as the time had room for
    logged = ""
    while not stop.is_set():
        receipt, is_sure = None, True
        polls += 1
        subscriber.told.clear()  # before the poll: what is told from here on may be missed by it
        try:
            receipt = _poll(subscriber, announcements, every_version=every_version)
            is_due = polls >= LOOK_BACK or failures > 0
            around, is_sure = _look_back(subscriber, is_due=is_due)
            polls = 0 if is_due else polls
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
                logger.warning("following %s: %s", subscriber.store.url, exc)
        if receipt is not None:
            yield receipt
        if receipt is None or receipt.lag_versions <= 0:  # else later versions are known already
            intervals = announcements.intervals if is_sure and not failures else 1
            polls += _wait(subscriber, failures, stop, intervals=intervals)


def _look_back(subscriber: Subscriber, *, is_due: bool) -> tuple[ApplyReceipt | None, bool]:
    """Check the held version in the store if a check is due; plan around a gap after it.

    Returns:
        The receipt of an apply, if any, and whether the held version was found in the store.
    """
    held, chain, watch = subscriber.held, subscriber.chain, subscriber.watch
    if held is None or not (is_due or chain.is_doubtful or watch.is_open(held)):
        return None, True
    try:
        is_there = watch.look(chain, held)
    except MirrorLagsError:
        if (newest := chain.head()) is not None:
            check_age(chain, newest)
        raise
    except BrokenChainError as exc:
        receipt = None if subscriber.pinned else _around(subscriber, exc)
        if receipt is None:
            raise
        return receipt, True
    subscriber.times.looked()
    if is_there and chain.latest == held.version and chain.trust.max_age_s is not None:
        check_age(chain, chain.read(held.version))
    return None, is_there


def _around(subscriber: Subscriber, exc: DeltaChainError) -> ApplyReceipt | None:
    """Update to the head by any plan, and log the reason."""
    receipt = subscriber.update()
    if receipt is not None:
        logger.warning("%s; reached version %d by another plan", exc.args[0], receipt.version)
    return receipt


def _poll(
    subscriber: Subscriber, announcements: Announcements, *, every_version: bool
) -> ApplyReceipt | None:
    """Poll once and apply what was found; compare it with what was announced."""
    before, announced = subscriber.version, announcements.take()
    subscriber.is_told = announcements.is_relied_upon
    receipt = _step(subscriber, every_version=every_version)
    held = subscriber.version
    if before is not None and held is not None and not subscriber.pinned:
        announcements.compare(announced, before, held)
    return receipt


def _step(subscriber: Subscriber, *, every_version: bool) -> ApplyReceipt | None:
    """Poll once for a new version and apply it; one request to the store if there is none."""
    chain = subscriber.chain
    subscriber.scrub(if_altered=True)
    held = subscriber.held
    if held is None:
        return subscriber.update()
    if subscriber.pinned:
        return None
    later = None
    try:
        later = chain.find(held.version + 1) if every_version else chain.later(held.version)
        subscriber.times.looked()
        return subscriber.update(later) if later else None
    except (FormatError, ObjectNotFoundError, BrokenChainError) as exc:
        if later and later.version == chain.newest(held.version):
            raise
        return _around(subscriber, exc)  # a plan may lead to a later version
    except (ChainError, BaseMismatchError):
        there = subscriber.version
        if not _was_rolled_back(subscriber) and (there is None or there <= held.version):
            raise
        return None  # rolled back or applied by another thread meanwhile


def _was_rolled_back(subscriber: Subscriber) -> bool:
    return subscriber.pinned and not subscriber.poisoned


def _wait(subscriber: Subscriber, failures: int, stop: Event, *, intervals: int) -> int:
    """Wait some poll intervals, longer after each failure; return the polls left out.

    The wait ends early, with none left out, when the loop is notified or stopped.
    """
    pause_s = between_polls(subscriber.poll_s * intervals).pause_s(failures)
    is_early = stop.is_set() or subscriber.told.wait(pause_s)
    return 0 if is_early else intervals - 1
