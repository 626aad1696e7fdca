"""Outage of a store: since when no request was answered."""

from __future__ import annotations

from threading import Lock


class Outage:
    """Time since which a client's requests have had no answer; thread-safe.

    Attributes:
        since: Start of the first of these requests, by ``time.monotonic()``; ``None`` while
            requests are answered, be it with an error.
    """

    def __init__(self) -> None:
        self.since: float | None = None
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
            self.since = None
