"""Requests to a remote store: each ends in time, is counted, and is repeated if that may help."""

import logging
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from threading import Lock
from typing import Final, TypeVar

from deltachain.retry import Backoff, Deadline
from deltachain.store.base import unavailable
from deltachain.threads import apart

FIRST_S: Final = 20.0  # of a call, if no request of its client has ever been answered
REPORT_S: Final = 5.0  # of retries, after which a store is first reported to be waited for
_LEAST_S: Final = 0.5  # of a request: the last one of a call begins at its deadline

_T = TypeVar("_T")

logger = logging.getLogger(__name__)


class RetryError(Exception):
    def __init__(
        self, reason: str, hint: str = "", *, wait_s: float = 0.0, answered: bool = False
    ) -> None:
        super().__init__(reason)
        self.hint, self.wait_s, self.answered = hint, wait_s, answered


def within(call: Callable[[], _T], deadline: Deadline) -> _T:
    """Return the result of a call, which is given up at the deadline, whatever it waits for.

    The timeout of a socket restarts with every byte. A call that was given up ends by its own.
    """
    least = time.monotonic() + _LEAST_S
    outcome = apart(call, "deltachain-request")
    if outcome is None:
        return call()
    while True:
        left_s = max(deadline.left_s, least - time.monotonic())
        if left_s <= 0 and not outcome.done():
            raise TimeoutError("the store is too slow")
        try:
            return outcome.result(max(left_s, 0))
        except TimeoutError:
            if outcome.done():
                raise


class Calls:
    def __init__(self, url: str, pauses: Backoff) -> None:
        self.requests = 0
        self.since: float | None = None
        self._url = url
        self._pauses = pauses
        self._lock = Lock()
        self._is_known = self._is_reported = False
        self._heard: tuple[float, float] | None = None

    def count(self, requests: int = 1) -> None:
        with self._lock:
            self.requests += requests

    def hear(self, date: str | None) -> None:
        """Record an answer, and the server's time if its ``Date`` header tells it."""
        with self._lock:
            self.since, self._is_known = None, True
        try:
            self._heard = parsedate_to_datetime(date or "").timestamp(), time.monotonic()
        except (ValueError, TypeError, OverflowError, IndexError):
            return

    def now(self) -> float | None:
        """Return the server's time, in seconds since 1970; ``None`` before its first answer."""
        if self._heard is None:
            return None
        told, at = self._heard
        return told + time.monotonic() - at

    def repeat(self, attempt: Callable[[], _T], deadline: Deadline, key: str = "") -> _T:
        """Send a request until it succeeds; one whose server was never heard gives up soon."""
        began, tries = time.monotonic(), 0
        answer: RetryError | None = None
        while True:
            sent = time.monotonic()
            try:
                return within(attempt, deadline)
            except RetryError as exc:
                last = exc
            except TimeoutError as exc:
                last = RetryError(f"TimeoutError: {exc}")
            if last.answered:  # a timeout of the last attempt says less than an answer before it
                answer = last
            else:
                with self._lock:
                    self.since = sent if self.since is None else min(self.since, sent)
            said = answer or last
            is_lost = not self._is_known and time.monotonic() - began > FIRST_S
            if is_lost or not deadline.pause(self._pauses.pause_s(tries), last.wait_s):
                error = unavailable(key, self._url, str(said), said.hint)
                raise error from (said.__cause__ or said)
            self._report(str(said), began, deadline.left_s)
            tries += 1

    def _report(self, said: str, began: float, left_s: float) -> None:
        if time.monotonic() - began > REPORT_S and not self._is_reported:
            self._is_reported = True
            logger.warning("%s: %s; trying again for %.0f s", self._url, said, left_s)
