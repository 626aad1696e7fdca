"""Guards of JSON input: duplicate keys and memory use."""

from __future__ import annotations

from typing import Any, Final

from deltachain.errors import MalformedError

MAX_VALUES: Final = 3_000_000
"""Limit of values in a document: 500,000 tensors in a table, about 0.5 GB as Python objects."""


def check_values(data: bytes, key: str) -> None:
    """Limit the number of values before parsing, since objects take up to 100x their JSON bytes.

    Raises:
        MalformedError: The document may have more than ``MAX_VALUES`` values.
    """
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
        raise MalformedError(f"{key}: has more than {MAX_VALUES} values", key=key)


def no_repeats(fields: list[tuple[str, Any]]) -> None:
    """Reject duplicate keys: JSON leaves their meaning undefined.

    Raises:
        ValueError: A key occurs twice.
    """
    seen = set()
    for name, _ in fields:
        if name in seen:
            raise ValueError(f"duplicate field {name[:80]!r}")
        seen.add(name)
