"""Outage of a store: since when no request was answered."""

from __future__ import annotations

import logging
import time
from threading import Lock
from typing import Final

FIRST_S: Final = 20.0
"""Seconds after which a call ends if no request of its client has ever been answered."""

REPORT_S: Final = 5.0
"""Seconds of retries after which a store is reported to be waited for, the first time."""

logger = logging.getLogger(__name__)


class Outage:
    """Time since which a client's requests have had no answer; thread-safe.

    Attributes:
        since: Start of the first of these requests, by ``time.monotonic()``; ``None`` while
            requests are answered, be it with an error.
        is_known: Whether any request was answered.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self.is_known = self._is_reported = False
        self._lock = Lock()

    def unanswered(self, sent: float) -> None:
        """Record that a request had no answer.

        Args:
            sent: Its start, by ``time.monotonic()``.
        """
        with self._lock:
            self.since = sent if self.since is None else min(self.since, sent)

    def answered(self) -> None:
        """Record that a request was answered."""
        with self._lock:
            self.since, self.is_known = None, True

    def is_lost(self, began: float) -> bool:
        """Return whether to end a call, as its client's settings may be wrong.

        Args:
            began: Start of the call, by ``time.monotonic()``.
        """
        return not self.is_known and time.monotonic() - began > FIRST_S

    def report(self, said: str, began: float, left_s: float) -> None:
        """Warn once of a call that has waited long and goes on to wait.

        Args:
            said: Why the last request failed.
            began: Start of the call, by ``time.monotonic()``.
            left_s: Seconds until the call ends.
        """
        if time.monotonic() - began > REPORT_S and not self._is_reported:
            self._is_reported = True
            logger.warning("%s; trying again for %.0f s", said, left_s)
