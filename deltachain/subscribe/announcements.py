"""Versions announced by the feed of a store, and how far they are relied upon.

A feed wakes the follow loop; only polls find versions. They are rare only while the feed is live
and agrees with them: it announced what they found, and they found what it announced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Lock
from typing import Final

from deltachain.format.keys import manifest_key, version_of
from deltachain.store import Store
from deltachain.threads import Closeable
from deltachain.types import Version

RARE: Final = 9
"""Poll intervals between two polls while the feed is relied upon: 34 to 56 s on the Hub, less than
the silence after which a replica usually counts as cut off from its store."""

_PREFIX: Final = manifest_key(0).partition("/")[0] + "/"


@dataclass(frozen=True, slots=True)
class FeedAgreement:
    """What the feed announced, compared with what polls found.

    Attributes:
        announced: Newest version announced since the last poll began; -1 for none.
        missing: Newest version that was announced and not found; -1 for none.
        silent: Newest version that was found and not announced; -1 for none.
    """

    announced: Version = -1
    missing: Version = -1
    silent: Version = -1

    @property
    def holds(self) -> bool:
        """Whether the feed and the polls agree."""
        return self.missing < 0 and self.silent < 0

    def announce(self, version: Version) -> FeedAgreement:
        """Add an announced version, which may be late."""
        silent = -1 if version >= self.silent else self.silent
        return replace(self, announced=max(self.announced, version), silent=silent)

    def compare(self, announced: Version, before: Version, found: Version) -> FeedAgreement:
        """Add the outcome of a poll.

        Args:
            announced: Newest version announced before the poll; -1 for none.
            before: Version held before the poll.
            found: Newest version that the poll found.
        """
        if announced > before and found <= before:
            return replace(self, missing=announced)
        if found <= before:
            return self
        # Announced before the poll, while it was under way, or before an earlier one.
        ever = max(announced, self.announced, self.missing)
        return replace(self, missing=-1, silent=-1 if ever > before else found)


class Announcements(Closeable):
    """Announcements of one follow loop; thread-safe.

    Args:
        store: The store; without a feed, nothing is ever announced.
        wake: Called when the loop is to poll at once; from any thread.
    """

    def __init__(self, store: Store, wake: Callable[[], None]) -> None:
        self._lock = Lock()
        self._wake = wake
        self._agreement = FeedAgreement()
        self._has_gap = self._is_compared = False
        self._feed = store.feed(_PREFIX, self._changed)

    @property
    def has_feed(self) -> bool:
        """Whether the store has a feed."""
        return self._feed is not None

    @property
    def is_relied_upon(self) -> bool:
        """Whether the feed is live and agrees with the polls."""
        return self._feed is not None and self._feed.is_live and self._agreement.holds

    @property
    def intervals(self) -> int:
        """Poll intervals until the next poll."""
        return RARE if self.is_relied_upon else 1

    def take(self) -> Version:
        """Return the newest version announced since the last call, -1 for none; a poll follows."""
        with self._lock:
            announced = self._agreement.announced
            self._agreement = replace(self._agreement, announced=-1)
            # What was committed before the feed was live was not to be announced.
            is_live = self._feed is not None and self._feed.is_live
            self._is_compared, self._has_gap = is_live and not self._has_gap, False
        return announced

    def compare(self, announced: Version, before: Version, found: Version) -> None:
        """Compare an answer of ``take`` with the outcome of the poll after it."""
        with self._lock:
            if self._is_compared:
                self._agreement = self._agreement.compare(announced, before, found)

    def close(self) -> None:
        """End the feed."""
        if self._feed is not None:
            self._feed.close()

    def _changed(self, key: str) -> None:
        """Wake the loop for a new manifest, unless the feed is not relied upon."""
        version = version_of(key)
        if version is not None and key == manifest_key(version):
            with self._lock:
                was = self._agreement
                self._agreement = was.announce(version)
            if was.holds:
                self._wake()
        elif not key:
            with self._lock:
                self._has_gap = True
            self._wake()
