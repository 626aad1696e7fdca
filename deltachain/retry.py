"""Deadlines of calls over a network, and pauses between their attempts.

Every pause is drawn at random, so that callers that failed together do not come back together.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Final

from deltachain.errors import StoreUnavailableError

DEADLINE_S: Final = 60.0
"""Seconds for which nothing may move before a call gives up, unless the user says otherwise."""

SLOWEST: Final = 1 << 20
"""Bytes a second below which a large object is given up even though it moves."""

_MOST_DOUBLINGS: Final = 32


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double with each failure in a row.

    Attributes:
        first_s: Seconds of the first pause, at most.
        longest_s: Seconds of any pause, at most.
        random_share: How much of a pause is random, from 0 to 1: at 1 it may end at once.
    """

    first_s: float
    longest_s: float
    random_share: float = 1.0

    def pause_s(self, failures: int) -> float:
        """Draw the seconds to wait.

        Args:
            failures: In a row, before the one that is waited after.
        """
        most = min(self.longest_s, self.first_s * 2.0 ** min(failures, _MOST_DOUBLINGS))
        return random.uniform(most * (1 - self.random_share), most)  # noqa: S311 - no secret


_PAUSES: Final = Backoff(0.1, 5.0)


def shortly_after(seconds: float) -> float:
    """Seconds until shortly after a moment that many may wait for."""
    return seconds + random.uniform(0.1, 0.6)  # noqa: S311


class Deadline:
    """The time limit of one call; its threads may share it.

    It ends when no byte has moved for ``stall_s``, and in any case after ``stall_s`` and one second
    for each MiB of the object.

    Args:
        key: The object.
        url: The store.
        stall_s: Seconds for which nothing may move.
        nbytes: How large the object is.
    """

    def __init__(self, key: str, url: str, stall_s: float, nbytes: int = 0) -> None:
        self._key = key
        self._url = url
        self._stall_s = stall_s
        self._total_s = stall_s + nbytes / SLOWEST
        self._began = self._moved = time.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds until it ends; not positive once it has."""
        now = time.monotonic()
        return min(self._began + self._total_s, self._moved + self._stall_s) - now

    def moved(self) -> None:
        """Note that bytes went over the wire.

        Raises:
            StoreUnavailableError: They came too late: so slow an object is given up.
        """
        self.check()
        self._moved = time.monotonic()

    def check(self) -> None:
        """Check that there is time left.

        Raises:
            StoreUnavailableError: There is none.
        """
        if self.left_s <= 0:
            raise self.error("the store is too slow")

    def pause(self, attempt: int) -> bool:
        """Wait before another attempt, and say whether there is time for one.

        Args:
            attempt: Attempts in a row that failed before this one.
        """
        delay = _PAUSES.pause_s(attempt)
        left = self.left_s
        if left <= 0:
            return False
        time.sleep(min(delay, left))
        return True

    def sleep(self, seconds: float) -> bool:
        """Wait for so long if there is as much time, and say whether there was."""
        if seconds >= self.left_s:
            return False
        time.sleep(seconds)
        return True

    def own(self) -> Deadline:
        """Return one with the same end for one of several transfers, which has moved just now."""
        other = Deadline(self._key, self._url, self._stall_s)
        other._began, other._total_s = self._began, self._total_s
        return other

    def shorter(self, seconds: float) -> Deadline:
        """Return one for the same object that begins now and has at most so many seconds."""
        return Deadline(self._key, self._url, min(seconds, self._stall_s))

    def error(self, reason: str) -> StoreUnavailableError:
        """Build the error for giving up."""
        after = time.monotonic() - self._began
        return StoreUnavailableError(
            f"object {self._key!r} in {self._url}: {reason}; given up after {after:.1f} s",
            key=self._key,
            url=self._url,
        )
