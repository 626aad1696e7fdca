"""Times of a subscriber: its last look and apply, and the commits of the versions it held."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Final

KEPT: Final = 64
"""Number of versions whose time of commit is remembered; a rollback may hold one of them again."""


class Times:
    """Times of a subscriber; thread-safe.

    Args:
        unanswered_since: Start of the store's first request without an answer since the last one
            with an answer, by ``time.monotonic()``; ``None`` for none.

    Attributes:
        looked_at: Time at which the store last answered a look or finished a fetch, in seconds
            since 1970; ``None`` before.
        applied_at: Time of the last swap, in seconds since 1970; ``None`` before.
    """

    def __init__(self, unanswered_since: Callable[[], float | None] = lambda: None) -> None:
        self._unanswered_since = unanswered_since
        self.looked_at: float | None = None
        self.applied_at: float | None = None
        self._since = time.monotonic()  # the wall clock may be set meanwhile
        self._stages = 0
        self._commits: OrderedDict[str, float] = OrderedDict()
        self._lock = Lock()

    @property
    def silence_s(self) -> float:
        """Seconds since the store last answered, or since the start.

        0 while objects are fetched and decoded; of stores that tell, only while requests for them
        are answered. Otherwise a fetch without an answer ends with an error, so this counts again
        soon.
        """
        with self._lock:
            since = self._unanswered_since() if self._stages else self._since
        return 0.0 if since is None else time.monotonic() - since

    def looked(self) -> None:
        """Record that the store answered."""
        with self._lock:
            self._since, self.looked_at = time.monotonic(), time.time()

    @contextmanager
    def staging(self) -> Iterator[None]:
        """Record that objects are fetched and decoded inside the context."""
        with self._lock:
            self._stages += 1
        try:
            yield
            self.looked()
        finally:
            with self._lock:
                self._stages -= 1

    def applied(self, manifest: str, committed_at: float) -> None:
        """Record a swap to the version of a manifest."""
        self.applied_at = time.time()
        self.committed(manifest, committed_at)

    def committed(self, manifest: str, at: float) -> None:
        """Record when the version of a manifest was committed."""
        with self._lock:
            self._commits[manifest] = at
            self._commits.move_to_end(manifest)
            while len(self._commits) > KEPT:
                self._commits.popitem(last=False)

    def commit_of(self, manifest: str) -> float | None:
        """Return when the version of a manifest was committed; ``None`` if it is not known."""
        return self._commits.get(manifest)
