"""Deadlines of network calls, and pauses between their attempts.

Pauses are random, so that callers that failed together do not retry together.
"""

import time
from dataclasses import dataclass
from random import SystemRandom
from typing import Final

from deltachain.errors import StoreUnavailableError

DEADLINE_S: Final = 60.0  # default stall limit: seconds without progress after which a call fails
SLOWEST: Final = 1 << 20  # bytes a second, below which a large transfer fails despite progress

_MOST_DOUBLINGS: Final = 32

RANDOM: Final = SystemRandom()  # a trainer's own draws stay as its seed makes them, also on ranks


@dataclass(frozen=True, slots=True)
class Backoff:
    first_s: float  # longest first pause, in seconds
    longest_s: float
    random_share: float = 1.0  # random fraction of a pause, from 0 to 1; at 1 a pause may be zero

    def pause_s(self, failures: int) -> float:
        """Draw the length of a pause, in seconds, after ``failures`` before the latest one."""
        most = min(self.longest_s, self.first_s * 2.0 ** min(failures, _MOST_DOUBLINGS))
        return RANDOM.uniform(most * (1 - self.random_share), most)


MOST_POLLS: Final = 32  # poll intervals: longest pause of a follow loop after failures


def between_polls(poll_s: float) -> Backoff:
    """Return the pauses of a follow loop: 25 % random around ``poll_s``, longer after failures."""
    return Backoff(1.25 * poll_s, 1.25 * poll_s * MOST_POLLS, random_share=0.4)


def shortly_after(seconds: float) -> float:
    return seconds + RANDOM.uniform(0.1, 0.6)


class Deadline:
    """Time limit of one call, shared by its threads.

    The call ends after ``stall_s`` seconds without progress, and at the latest after ``stall_s``
    plus one second for each MiB of the object.
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
        """Record progress of the transfer; raise ``TimeoutError`` past the deadline."""
        if self.left_s <= 0:
            raise TimeoutError("the store is too slow")
        self._moved = time.monotonic()

    def pause(self, seconds: float, least_s: float = 0.0) -> bool:
        """Wait before another attempt, which needs ``least_s``; return whether there is time."""
        left_s = self.left_s
        if left_s <= 0 or least_s > left_s:
            return False
        time.sleep(max(least_s, min(seconds, left_s)))
        return True

    def error(self, reason: str) -> StoreUnavailableError:
        after = time.monotonic() - self._began
        return StoreUnavailableError(
            f"object {self._key!r} in {self._url}: {reason}; given up after {after:.1f} s",
            key=self._key,
            url=self._url,
        )
