"""Deadlines of network calls, and pauses between their attempts.

Pauses are random, so that callers that failed together do not retry together.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Final

from deltachain.errors import StoreUnavailableError

DEADLINE_S: Final = 60.0
"""Default stall limit: seconds without progress after which a call fails."""

SLOWEST: Final = 1 << 20
"""Least throughput of a large transfer, in bytes a second; a slower one fails despite progress."""

_MOST_DOUBLINGS: Final = 32


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double with each consecutive failure.

    Attributes:
        first_s: Upper limit of the first pause, in seconds.
        longest_s: Upper limit of any pause, in seconds.
        random_share: Random fraction of a pause, from 0 to 1; at 1 a pause may be zero.
    """

    first_s: float
    longest_s: float
    random_share: float = 1.0

    def pause_s(self, failures: int) -> float:
        """Draw the length of a pause, in seconds.

        Args:
            failures: Consecutive failures before the latest one.
        """
        most = min(self.longest_s, self.first_s * 2.0 ** min(failures, _MOST_DOUBLINGS))
        return random.uniform(most * (1 - self.random_share), most)  # noqa: S311 - no secret


_PAUSES: Final = Backoff(0.1, 5.0)


MOST_POLLS: Final = 32
"""Upper bound of the back-off of a follow loop after repeated failures, in poll intervals."""


def between_polls(poll_s: float) -> Backoff:
    """Return the pauses of a follow loop: 25 % random around ``poll_s``, longer after failures.

    Args:
        poll_s: Seconds between two polls, on average.
    """
    return Backoff(1.25 * poll_s, 1.25 * poll_s * MOST_POLLS, random_share=0.4)


def shortly_after(seconds: float) -> float:
    """Return a random wait slightly longer than ``seconds``, as many callers may wait for it."""
    return seconds + random.uniform(0.1, 0.6)  # noqa: S311


class Deadline:
    """Time limit of one call, shared by its threads.

    The call ends after ``stall_s`` seconds without progress, and at the latest after ``stall_s``
    plus one second for each MiB of the object.

    Args:
        key: Key of the object.
        url: URL of the store.
        stall_s: Longest time without progress, in seconds.
        nbytes: Size of the object, in bytes.
    """

    def __init__(self, key: str, url: str, stall_s: float, nbytes: int = 0) -> None:
        self._key = key
        self._url = url
        self._stall_s = stall_s
        self._total_s = stall_s + nbytes / SLOWEST
        self._began = self._moved = time.monotonic()

    @property
    def left_s(self) -> float:
        """Remaining seconds; zero or negative once the deadline has passed."""
        now = time.monotonic()
        return min(self._began + self._total_s, self._moved + self._stall_s) - now

    def moved(self) -> None:
        """Record progress of the transfer.

        Raises:
            StoreUnavailableError: The deadline has passed: the transfer is too slow.
        """
        self.check()
        self._moved = time.monotonic()

    def check(self) -> None:
        """Check that time is left.

        Raises:
            StoreUnavailableError: The deadline has passed.
        """
        if self.left_s <= 0:
            raise self.error("the store is too slow")

    def pause(self, attempt: int) -> bool:
        """Wait before another attempt; return whether there is time for one.

        Args:
            attempt: Consecutive failed attempts before this one.
        """
        delay = _PAUSES.pause_s(attempt)
        left = self.left_s
        if left <= 0:
            return False
        time.sleep(min(delay, left))
        return True

    def sleep(self, seconds: float) -> bool:
        """Wait if the remaining time allows; return whether it did."""
        if seconds >= self.left_s:
            return False
        time.sleep(seconds)
        return True

    def own(self) -> Deadline:
        """Return a deadline with the same end for one of several transfers, with progress now."""
        other = Deadline(self._key, self._url, self._stall_s)
        other._began, other._total_s = self._began, self._total_s
        return other

    def shorter(self, seconds: float) -> Deadline:
        """Return a deadline for the same object that begins now, of at most ``seconds``."""
        return Deadline(self._key, self._url, min(seconds, self._stall_s))

    def error(self, reason: str) -> StoreUnavailableError:
        """Build the error of a failed call."""
        after = time.monotonic() - self._began
        return StoreUnavailableError(
            f"object {self._key!r} in {self._url}: {reason}; given up after {after:.1f} s",
            key=self._key,
            url=self._url,
        )
