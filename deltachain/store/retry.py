"""How long a call on a store over a network goes on trying, and how it waits in between."""

from __future__ import annotations

import random
import time
from typing import Final

from deltachain.errors import StoreUnavailableError

DEADLINE_S: Final = 60.0
"""Seconds for which nothing may move before a call gives up, unless the user says otherwise."""

SLOWEST: Final = 1 << 20
"""Bytes a second below which a large object is given up even though it moves."""

_FIRST_S: Final = 0.1
_LONGEST_S: Final = 5.0


class Deadline:
    """The patience of one call; its threads may share it.

    It ends once nothing has moved for ``stall_s``, and in any case after ``stall_s`` and one second
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
        """Go on only while there is time.

        Raises:
            StoreUnavailableError: It is over.
        """
        if self.left_s <= 0:
            raise self.error("the store is too slow")

    def pause(self, attempt: int) -> bool:
        """Wait before another attempt, and say whether there is time for one.

        Args:
            attempt: Attempts in a row that failed before this one.
        """
        delay = jitter(attempt)
        left = self.left_s
        if left <= 0:
            return False
        time.sleep(min(delay, left))
        return True

    def own(self) -> Deadline:
        """Another one that ends as this one does, for one of several transfers.

        In it nothing may move for as long, from now on.
        """
        other = Deadline(self._key, self._url, self._stall_s)
        other._began, other._total_s = self._began, self._total_s
        return other

    def shorter(self, seconds: float) -> Deadline:
        """Another one for the same object, from now on: of no more than so many seconds."""
        return Deadline(self._key, self._url, min(seconds, self._stall_s))

    def error(self, reason: str) -> StoreUnavailableError:
        """Build the error for giving up."""
        after = time.monotonic() - self._began
        return StoreUnavailableError(
            f"object {self._key!r} in {self._url}: {reason}; given up after {after:.1f} s",
            key=self._key,
            url=self._url,
        )


def jitter(attempt: int) -> float:
    """Seconds to wait after that many failures in a row.

    Drawn from all of zero to a bound that doubles, so that many who failed together do not come
    back together.
    """
    bound = min(_LONGEST_S, _FIRST_S * 2.0 ** min(attempt, 16))
    return random.uniform(0, bound)  # noqa: S311 - it is no secret
