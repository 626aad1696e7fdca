"""Reads of objects in concurrent ranges, each resumed where its connection was cut.

The store is accessed only through a function that opens a range.
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
"""Size of one range, in bytes: a few of them saturate a link, and a cut costs little."""

_CHUNK_NBYTES: Final = 1 << 20
"""Largest number of bytes read from a connection at a time."""

_LEAST_NBYTES: Final = 4 << 10
_LATE_S: Final = 0.1


class CutError(Exception):
    """The body ended early, or its connection failed; the rest must be requested again."""


class ReplacedError(Exception):
    """The object was replaced during the read."""


class Body(Protocol):
    """Body of one response."""

    def readinto(self, buffer: memoryview, /) -> int:
        """Read into ``buffer`` and return the number of bytes; 0 at the end.

        Raises:
            CutError: The remaining bytes cannot be read.
        """

    def close(self) -> None:
        """Discard the remaining bytes."""


@dataclass(frozen=True, slots=True)
class Opened:
    """One response.

    Attributes:
        body: The requested bytes.
        nbytes: Size of the whole object, in bytes.
        pin: Identifier of this content of the object; empty if the server has none.
    """

    body: Body
    nbytes: int
    pin: str


Open: TypeAlias = Callable[[int, int, str], Opened]
"""Function that opens bytes ``start`` to ``stop`` of an object; arguments: start, stop, pin.

With a pin, it raises ``ReplacedError`` if the object has other content. It retries by itself.
"""


def read_rest(opened: Opened, start: int, view: memoryview, reopen: Open, limit: Deadline) -> None:
    """Fill ``view`` from a response that begins at byte ``start``; resume it after cuts.

    Raises:
        ReplacedError: The object was replaced before its last byte was read.
        StoreUnavailableError: The deadline passed.
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
    """Read a whole object into one buffer, in several concurrent ranges.

    Args:
        opened: First range: ``RANGE_NBYTES``, or the whole object if that is smaller.
        nbytes: Size of the object, in bytes.
        reopen: Function that opens another range.
        limit: Deadline of the read.
        pool: Threads for the later ranges; the caller's thread reads the first.

    Raises:
        ReplacedError: The object was replaced before its last byte was read.
        StoreUnavailableError: The deadline passed.
    """
    # Not a bytearray, which is zeroed first. Either every byte is written below, or we raise.
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
        # No thread writes into the buffer after the return, or counts a request after a failure.
        for future in rest:
            future.cancel()
        wait(rest)
    return buffer


def _drain(body: Body, view: memoryview) -> Iterator[int]:
    """Fill ``view`` up to the end of the body; yield the number of bytes of each step.

    A step reads the bytes available at the time, so that a slow server cannot block it for long.
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
    """Return a later response, unless its size or pin shows other content than the first.

    Raises:
        ReplacedError: The content differs.
    """
    if (later.nbytes, later.pin) != (first.nbytes, first.pin):
        later.body.close()
        raise ReplacedError
    return later
