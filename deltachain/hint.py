"""The head hint: where to begin to look for the newest version; never the truth."""

from __future__ import annotations

from deltachain.errors import FormatError, ObjectNotFoundError
from deltachain.keys import HEAD_KEY
from deltachain.manifest import Head, parse
from deltachain.store import Store


def read_hint(store: Store) -> Head:
    """The hint, or the beginning when there is none that can be read."""
    try:
        return parse(store.get(HEAD_KEY), Head, key=HEAD_KEY)
    except (ObjectNotFoundError, FormatError):
        return Head(version=0)
