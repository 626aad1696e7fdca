"""Sliding-window rate limit."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable


class Budget:
    """At most ``calls`` requests in any stretch of ``window_s`` seconds, from any threads.

    The stretch slides, so the limit also holds in every fixed window of the same length, wherever
    that begins: but for what requests are late by on their way, a server that allows as much as
    this budget refuses none of them.
    """

    def __init__(
        self,
        calls: int,
        window_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.calls = calls
        self.window_s = window_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._sent: deque[float] = deque()

    def take(self, within_s: float) -> float:
        """Wait until one more request may leave, and account for it.

        Args:
            within_s: How long to wait at most.

        Returns:
            0, or the seconds until one may leave where that is longer; nothing was accounted for.
        """
        deadline = self._clock() + within_s
        while True:
            wait_s = self._try_take()
            if wait_s <= 0:
                return 0.0
            if self._clock() + wait_s > deadline:
                return wait_s
            self._sleep(wait_s)

    def charge(self, requests: int) -> None:
        """Count requests that were sent without ``take``; later ones wait for them."""
        with self._lock:
            self._sent.extend([self._clock()] * requests)

    def _try_take(self) -> float:
        """Account for a request, or say how long the oldest one still counts."""
        with self._lock:
            now = self._clock()
            while self._sent and self._sent[0] + self.window_s <= now:
                self._sent.popleft()
            if len(self._sent) < self.calls:
                self._sent.append(now)
                return 0.0
            return self._sent[0] + self.window_s - now
