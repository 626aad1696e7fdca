"""The loop of a mirror that follows its source."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from threading import Event
from typing import Final

from deltachain.errors import (
    ChainMismatchError,
    ConfigError,
    DeltaChainError,
    ForkedChainError,
    StoreUnavailableError,
    UnsupportedFormatError,
)
from deltachain.mirror.mirror import LOOK_BACK, Mirror
from deltachain.mirror.receipt import MirrorReceipt
from deltachain.retry import between_polls

logger = logging.getLogger(__name__)

NEEDS_A_PERSON: Final = (
    ChainMismatchError,
    ConfigError,
    ForkedChainError,
    UnsupportedFormatError,
)
"""Errors that end the loop."""


def follow(
    mirror: Mirror,
    *,
    stop: Event,
    poll_s: float,
    looked: Callable[[DeltaChainError | None], None] = lambda _: None,
) -> Iterator[MirrorReceipt]:
    """Copy versions as they are committed, until ``stop`` is set.

    A store that is unavailable, and an object that is missing or damaged, are logged once and tried
    again with back-off.

    Args:
        mirror: The mirror.
        stop: Ends the loop.
        poll_s: Seconds between two looks at the source.
        looked: Called after each round with the error to be retried, or ``None``.

    Raises:
        ForkedChainError: Source and mirror have different histories.
        ConfigError: The destination is no mirror, or not any more.
        ChainMismatchError: The destination mirrors another chain.
        UnsupportedFormatError: The chain needs a newer deltachain.
    """
    failures, logged = 0, ""
    while not stop.is_set():
        try:
            yield from mirror.catch_up(stop)
            failures, logged = 0, ""
            looked(None)
        except NEEDS_A_PERSON:
            raise
        except DeltaChainError as exc:
            failures += 1
            mirror.rounds += LOOK_BACK - 1 - mirror.rounds % LOOK_BACK  # the next one looks back
            looked(exc)
            what = type(exc).__name__ if isinstance(exc, StoreUnavailableError) else str(exc)
            if what != logged:  # a store that is down fails with any of its objects
                logged = what
                logger.warning("mirroring: %s", exc)
        stop.wait(between_polls(poll_s).pause_s(failures))
