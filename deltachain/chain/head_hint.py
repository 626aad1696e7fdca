"""The head hint: where to begin to look for the newest version; never the truth."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from deltachain.errors import FormatError, ObjectNotFoundError
from deltachain.format.documents import Head, parse
from deltachain.format.keys import HEAD_KEY
from deltachain.store import Store

MAX_HINT: Final = 1 << 16
"""Bytes of the largest hint that is read. Nobody proves it, so it may cost next to nothing."""

MAX_ANCHORS: Final = 16
"""Anchors of a hint that are planned with: the newest."""

MAX_VERSION: Final = 1 << 53
"""No chain is as long. A larger number is no hint."""


def read_hint(store: Store) -> Head:
    """The hint, or the beginning when there is none that can be read."""
    try:
        hint = parse(store.get(HEAD_KEY, limit=MAX_HINT), Head, key=HEAD_KEY)
    except (ObjectNotFoundError, FormatError):
        return Head(version=0)
    if hint.version > MAX_VERSION:
        return Head(version=0)
    return replace(hint, anchors=hint.anchors[-MAX_ANCHORS:])
