"""Objects read in ranges, several at a time, each resumed where its connection was cut.

Knows nothing of the store behind it but a function that opens a range.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np

from deltachain.retry import Deadline
from deltachain.threads import Pool

RANGE_NBYTES: Final = 8 << 20
"""Bytes asked for at a time: some of them fill a link, and a cut costs little."""

_CHUNK_NBYTES: Final = 1 << 20
"""Bytes taken from a connection at a time, if they come soon."""

_LEAST_NBYTES: Final = 4 << 10
_LATE_S: Final = 0.1


class CutError(Exception):
    """The body ended early, or its connection failed; the rest must be requested again."""


class ReplacedError(Exception):
    """The object was replaced while it was read."""


class Body(Protocol):
    """The bytes of one answer, in order."""

    def readinto(self, buffer: memoryview, /) -> int:
        """Read into ``buffer`` and return the number of bytes; 0 at the end.

        Raises:
            CutError: The rest will not come.
        """

    def close(self) -> None:
        """Leave the rest."""


@dataclass(frozen=True, slots=True)
class Opened:
    """One answer.

    Attributes:
        body: The bytes asked for.
        nbytes: What the whole object measures.
        pin: Names this content of the object; empty where the server has no name for it.
    """

    body: Body
    nbytes: int
    pin: str


Open: TypeAlias = Callable[[int, int, str], Opened]
"""Opens bytes ``start`` to ``stop`` of the object, of the content that a pin names if there is one.

Raises ``ReplacedError`` where the object is not the pinned one. It retries by itself.
"""


def read_rest(opened: Opened, start: int, view: memoryview, reopen: Open, limit: Deadline) -> None:
    """Fill ``view`` from an answer that begins at byte ``start``, and with what resumes it.

    Raises:
        ReplacedError: The object was replaced before its last byte was there.
        StoreUnavailableError: It took too long.
    """
    at = attempt = 0
    while True:
        with closing(opened.body) as body:
            try:
                for nbytes in _drain(body, view[at:]):
                    limit.moved()
                    at += nbytes
                    attempt = 0
            except CutError as exc:
                cut: CutError | None = exc
            else:
                cut = None
        if at == len(view):
            return
        if not limit.pause(attempt):
            often = "its body is cut again and again"
            raise limit.error(often if attempt else "the store is too slow") from cut
        limit.check()
        attempt += 1
        opened = _same(opened, reopen(start + at, start + len(view), opened.pin))


def read_ranges(
    opened: Opened, nbytes: int, reopen: Open, limit: Deadline, pool: Pool
) -> memoryview:
    """Read a whole object into one buffer, in several ranges at a time.

    Args:
        opened: Its first range, of ``RANGE_NBYTES`` where the object is larger.
        nbytes: What the object measures.
        reopen: Opens another range.
        limit: When to give up.
        pool: Reads the ranges after the first, which the caller's thread reads.

    Raises:
        ReplacedError: The object was replaced before its last byte was there.
        StoreUnavailableError: It took too long.
    """
    # Not a bytearray: that is filled with zeros first. Every byte is written below, or we raise.
    buffer = np.empty(nbytes, np.uint8).data

    def fetch(start: int) -> None:
        stop = min(start + RANGE_NBYTES, nbytes)
        found = _same(opened, reopen(start, stop, opened.pin))
        read_rest(found, start, buffer[start:stop], reopen, limit)

    rest: list[Future[None]] = []
    try:
        rest += [pool.submit(fetch, start) for start in range(RANGE_NBYTES, nbytes, RANGE_NBYTES)]
        read_rest(opened, 0, buffer[:RANGE_NBYTES], reopen, limit)
        for future in rest:
            future.result()
    finally:
        # Nobody writes into the buffer once it is given away, or counts a request after a failure.
        for future in rest:
            future.cancel()
        wait(rest)
    return buffer


def _drain(body: Body, view: memoryview) -> Iterator[int]:
    """Fill ``view`` as far as the body goes; yield how much each step brought.

    A step takes as many bytes as come soon, so that a slow server cannot hold a step for long.
    """
    at, size = 0, _CHUNK_NBYTES // 16
    while at < len(view):
        began = time.monotonic()
        nbytes = body.readinto(view[at : at + size])
        if not nbytes:
            return
        at += nbytes
        yield nbytes
        late = time.monotonic() - began > _LATE_S
        size = max(_LEAST_NBYTES, size // 4) if late else min(_CHUNK_NBYTES, size * 2)


def _same(first: Opened, later: Opened) -> Opened:
    """Another answer about an object, if it is of the same content as far as can be told."""
    if (later.nbytes, later.pin) != (first.nbytes, first.pin):
        later.body.close()
        raise ReplacedError
    return later
