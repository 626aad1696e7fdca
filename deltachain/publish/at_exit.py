"""Publishers that are open when Python ends."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from deltachain.errors import DeltaChainError

if TYPE_CHECKING:
    from deltachain.publish.publisher import Publisher

logger = logging.getLogger(__name__)

_open: Final[WeakKeyDictionary[Publisher, tuple[int, Callable[[], None] | None]]] = (
    WeakKeyDictionary()
)
"""Process that attached each open publisher, and what closes it: a forked child must not commit its
versions."""


def close_at_exit(publisher: Publisher, close: Callable[[], None] | None = None) -> None:
    """Close a publisher when Python ends, so that its last version is committed.

    One of several ranks is not closed: the others may have ended, or wait for something else.

    Args:
        publisher: The publisher.
        close: Closes it unless an error ends Python; by default, and after an error, its ``close``.
    """
    _open[publisher] = os.getpid(), close


def is_closed(publisher: Publisher) -> None:
    """Forget a publisher that was closed."""
    _open.pop(publisher, None)


@atexit.register
def _close_all() -> None:
    has_failed = getattr(sys, "last_value", None) is not None
    for publisher, (process, close) in list(_open.items()):
        if process != os.getpid():
            continue
        if not publisher.is_alone:
            logger.warning(
                "the publisher at %s was not closed: its last version may not be committed",
                publisher.url,
            )
            continue
        try:
            (publisher.close if has_failed or close is None else close)()
        except DeltaChainError as error:
            logger.warning("closing the publisher at %s as Python ended: %s", publisher.url, error)
