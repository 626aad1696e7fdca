"""Guards of JSON input: duplicate keys, memory use and first decodes in several threads."""

from __future__ import annotations

from threading import Lock
from typing import Any, Final, TypeVar

import msgspec

from deltachain.errors import MalformedError

MAX_VALUES: Final = 3_000_000
"""Limit of values in a document: 500,000 tensors in a table, about 0.5 GB as Python objects."""

_T = TypeVar("_T")
_lock = Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decode(data: bytes | bytearray | memoryview, kind: type[_T]) -> _T:
    """Decode JSON strictly as a type.

    msgspec 0.22 crashes the process where two threads are the first to decode a nested struct; so
    decoders are made one at a time.

    Raises:
        MsgspecError: The data is invalid.
        RecursionError: The data is nested too deeply.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        with _lock:
            decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    found: _T = decoder.decode(data)
    return found


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
