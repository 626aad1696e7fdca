"""Clock of a store's server, read from the dates of its answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime


class ServerClock:
    """Clock of a server, as its answers tell it; thread-safe.

    Args:
        elapsed: Seconds since any moment, which nobody sets.
    """

    def __init__(self, elapsed: Callable[[], float] = time.monotonic) -> None:
        self._elapsed = elapsed
        self._heard: tuple[float, float] | None = None

    def hear(self, date: str | None) -> None:
        """Note the ``Date`` header of an answer; one that is missing or no date changes nothing."""
        try:
            self._heard = parsedate_to_datetime(date or "").timestamp(), self._elapsed()
        except (ValueError, TypeError, OverflowError, IndexError):
            return

    def now(self) -> float | None:
        """Return the server's time, in seconds since 1970; ``None`` before its first answer."""
        if self._heard is None:
            return None
        told, at = self._heard
        return told + self._elapsed() - at
