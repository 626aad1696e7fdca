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

NOT_BEGUN: Final = (errors.NoChainError, errors.NoVersionError)
"""Errors before a chain's first version: nothing has failed."""

_T = TypeVar("_T")

Round: TypeAlias = Generator[_T, None, bool]  # returns whether the next is due

Looked: TypeAlias = Callable[[errors.DeltaChainError | None], None]  # after a round

_WAITS: Final = "no version yet, waiting for the first one; check the URL if it was published"

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

    Errors are logged once and retried with back-off, except ``NEEDS_A_PERSON``. A chain's first
    version is waited for without either.
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
            waits = isinstance(exc, NOT_BEGUN)
            failures = 0 if waits else failures + 1
            looked(None if waits else exc)
            # A store that is down fails with any of its objects.
            is_away = isinstance(exc, errors.StoreUnavailableError)
            said = _WAITS if waits else type(exc).__name__ if is_away else str(exc)
            if said != logged:
                logged = said
                level = logging.INFO if waits else logging.WARNING
                logger.log(level, "%s: %s", doing, _WAITS if waits else exc)
        if not is_due and not stop.is_set():
            (told or stop).wait(between_polls(poll_s).pause_s(failures))
