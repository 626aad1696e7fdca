"""Events of a bucket's feed: server-sent events, parsed in bounded memory.

The Hub documents no feed; the events are those that ``huggingface_hub`` 2.4 reads. Unknown and
malformed ones are skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

Name: TypeAlias = Literal["ready", "changes", "reset", "reconnect"]

MOST_BYTES: Final = 4 << 20
"""Largest event, in bytes: 10,000 changes."""

_MOST_CURSOR: Final = 1024
_LINE_END: Final = re.compile(rb"\r\n|\n|\r(?!$)")  # a CR at the end may be half of a CRLF


class OversizedEventError(Exception):
    """An event has more than ``MOST_BYTES`` bytes: the stream is no feed."""


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """One event.

    Attributes:
        name: ``ready``: earlier changes were sent, and new ones follow as they are made;
            ``changes``; ``reset``: the changes after the cursor are not known any more;
            ``reconnect``: the Hub ends the stream.
        cursor: Name of the place after this event, to resume there; empty if none was sent.
        paths: Paths of changed files, for ``changes``.
    """

    name: Name
    cursor: str = ""
    paths: tuple[str, ...] = ()


def parse_events(pieces: Iterable[bytes]) -> Iterator[FeedEvent]:
    """Yield the events in the bytes of a stream, as soon as each is complete.

    Raises:
        OversizedEventError: An event is too large.
    """
    name, data = b"", bytearray()
    for line in _lines(pieces):
        if not line:
            event = _parse(name, bytes(data))
            if event is not None:
                yield event
            name, data = b"", bytearray()
            continue
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            name = value
        elif field == b"data":
            data += value + b"\n"
            if len(data) > MOST_BYTES:
                raise OversizedEventError


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Split a stream into lines that end in LF, CR or CRLF."""
    rest = b""
    for piece in pieces:
        # Only a line that a piece ends is scanned again, so that many pieces cost no more than one.
        parts = _LINE_END.split(rest + piece) if _ends_line(rest, piece) else [rest + piece]
        yield from parts[:-1]
        rest = parts[-1]
        if len(rest) > MOST_BYTES:
            raise OversizedEventError


def _ends_line(rest: bytes, piece: bytes) -> bool:
    return b"\n" in piece or b"\r" in piece or rest.endswith(b"\r")


def _parse(name: bytes, data: bytes) -> FeedEvent | None:
    """Return an event; None for one to be skipped."""
    known = next((each for each in get_args(Name) if each.encode() == name), None)
    if known is None:
        return None
    try:
        document = json.loads(data) if data.strip() else {}
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    cursor = document.get("cursor")
    if not isinstance(cursor, str) or len(cursor) > _MOST_CURSOR or not cursor.isprintable():
        cursor = ""
    rows = document.get("changes") if known == "changes" else []
    if not isinstance(rows, list):
        return None
    return FeedEvent(known, cursor, tuple(_paths(rows)))


def _paths(rows: list[Any]) -> Iterator[str]:
    for row in rows:
        path = row.get("path") if isinstance(row, dict) else None
        if isinstance(path, str):
            yield path
