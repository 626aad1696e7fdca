"""Clock of the uploads of an edge, some of which run at the same time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock


@dataclass(frozen=True, slots=True)
class MeasuredTransfer:
    """Objects that crossed the link together: their size in bytes, and the time in seconds."""

    nbytes: int
    seconds: float


class UploadClock:
    """Measures uploads: their bytes, and the time in which at least one is under way.

    Thread-safe. Uploads that run at the same time share the link, so their times do not add up.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._running = 0
        self._since = 0.0
        self._nbytes, self._seconds = 0, 0.0

    @contextmanager
    def upload(self, nbytes: int) -> Iterator[None]:
        """Measure one upload of ``nbytes``; one that fails counts for time alone."""
        with self._lock:
            if not self._running:
                self._since = time.perf_counter()
            self._running += 1
        sent = 0
        try:
            yield
            sent = nbytes
        finally:
            with self._lock:
                self._running -= 1
                self._nbytes += sent
                if not self._running:
                    self._seconds += time.perf_counter() - self._since

    @property
    def total(self) -> MeasuredTransfer:
        """All uploads that have ended, as one transfer."""
        with self._lock:
            return MeasuredTransfer(self._nbytes, self._seconds)
