"""Sliding-window rate limit."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable


class Budget:
    """Limit of ``calls`` requests in any period of ``window_s`` seconds, over all threads.

    The period slides, so the limit also holds in every fixed window of the same length, wherever it
    begins: apart from network delays, a server with the same limit refuses no request.
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
        """Wait until one more request is allowed, and count it.

        Args:
            within_s: Longest wait, in seconds.

        Returns:
            0, or the seconds until a request is allowed if that is longer; then none was counted.
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
        """Count requests sent without ``take``; later requests wait for them."""
        with self._lock:
            self._sent.extend([self._clock()] * requests)

    def _try_take(self) -> float:
        """Count a request and return 0, or return the seconds until the oldest one expires."""
        with self._lock:
            now = self._clock()
            while self._sent and self._sent[0] + self.window_s <= now:
                self._sent.popleft()
            if len(self._sent) < self.calls:
                self._sent.append(now)
                return 0.0
            return self._sent[0] + self.window_s - now
