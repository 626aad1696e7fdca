"""The head hint: a starting point of the search for the newest version; may be out of date."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from deltachain.errors import FormatError, ObjectNotFoundError
from deltachain.format.documents import Head, parse
from deltachain.format.keys import HEAD_KEY
from deltachain.store import Store

MAX_HINT: Final = 1 << 16
"""Size limit of a hint, in bytes. It is not authenticated, so reading it must be cheap."""

MAX_ANCHORS: Final = 16
"""Number of anchors used from a hint, the newest."""

MAX_VERSION: Final = 1 << 53
"""Largest plausible version; a hint with a larger one is ignored."""


def read_hint(store: Store) -> Head:
    """Read the hint; version 0 if it is missing or unreadable."""
    try:
        hint = parse(store.get(HEAD_KEY, limit=MAX_HINT), Head, key=HEAD_KEY)
    except (ObjectNotFoundError, FormatError):
        return Head(version=0)
    if hint.version > MAX_VERSION:
        return Head(version=0)
    return replace(hint, anchors=hint.anchors[-MAX_ANCHORS:])
