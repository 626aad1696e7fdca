"""What JSON leaves open, closed before a document is read."""

from __future__ import annotations

from typing import Any, Final

from deltachain.errors import MalformedError

MAX_VALUES: Final = 3_000_000
"""Values in one document: a table of half a million tensors, and half a gigabyte as objects."""


def check_values(data: bytes, key: str) -> None:
    """Refuse what would take a hundred times its bytes as objects; counted without reading it.

    Raises:
        MalformedError: It may have more values than any document.
    """
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
        raise MalformedError(f"{key}: has more than {MAX_VALUES} values", key=key)


def no_repeats(fields: list[tuple[str, Any]]) -> None:
    """Reject duplicate keys: JSON leaves their meaning undefined.

    Raises:
        ValueError: A name is there twice.
    """
    seen = set()
    for name, _ in fields:
        if name in seen:
            raise ValueError(f"field {name[:80]!r} is there twice")
        seen.add(name)
