"""The loop of whoever follows a chain: rounds, pauses between them, and errors that pass."""

import logging
from collections.abc import Callable, Generator, Iterator
from threading import Event
from typing import Final, TypeAlias, TypeVar

from deltachain import errors
from deltachain.retry import between_polls

NEEDS_A_PERSON: Final = (
    errors.ChainMismatchError,
    errors.ConfigError,
    errors.ForkedChainError,
    errors.LeaderReplacedError,
    errors.TensorMismatchError,
    errors.UnsupportedFormatError,
)

_T = TypeVar("_T")

Round: TypeAlias = Generator[_T, None, bool]  # returns whether the next is due

Looked: TypeAlias = Callable[[errors.DeltaChainError | None], None]  # after a round

logger = logging.getLogger(__name__)


def repeat(
    round_: Callable[[int], Round[_T]],
    *,
    stop: Event,
    poll_s: float,
    looked: Looked,
    doing: str,
    told: Event | None = None,
) -> Iterator[_T]:
    """Yield the results of rounds until ``stop`` is set.

    Errors are logged once and retried with back-off, except ``NEEDS_A_PERSON``.
    """
    failures, logged = 0, ""
    while not stop.is_set():
        is_due = False
        if told is not None:
            told.clear()  # before the round: what is told from here on may be missed by it
        try:
            is_due = yield from round_(failures)
            failures, logged = 0, ""
        except NEEDS_A_PERSON:
            raise
        except errors.DeltaChainError as exc:
            failures += 1
            looked(exc)
            # A store that is down fails with any of its objects.
            said = type(exc).__name__ if isinstance(exc, errors.StoreUnavailableError) else str(exc)
            if said != logged:
                logged = said
                logger.warning("%s: %s", doing, exc)
        if not is_due and not stop.is_set():
            (told or stop).wait(between_polls(poll_s).pause_s(failures))
