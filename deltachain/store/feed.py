"""Feed of a store: word of objects as they are written, so that readers need not poll often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

OnChange: TypeAlias = Callable[[str], None]
"""Function called with the key of an object that was written or deleted; with an empty key if
changes may have been missed, so that the caller looks once. Called from a thread of the feed: it
returns soon and raises nothing."""


class Feed(Protocol):
    """Word of changes in a store; thread-safe.

    A feed is a hint and nothing more: it may omit changes, repeat them, be late, and name objects
    that do not exist. Whoever uses it still polls, less often while ``is_live``.
    """

    @property
    def is_live(self) -> bool:
        """Whether the store was heard from lately, so that new changes are expected to arrive."""

    def close(self) -> None:
        """End the feed; idempotent. ``on_change`` is not called after the return."""
