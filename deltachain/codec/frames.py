"""Byte streams in independent frames of at most 1 MiB, each with its own digest.

A reader verifies and inflates only the frames it needs, also concurrently.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import zstandard

from deltachain.codec.container import ReadAt
from deltachain.errors import DigestMismatchError, MalformedError
from deltachain.format.digest import object_digest
from deltachain.types import Buffer

FRAME: Final = 1 << 20
"""Largest inflated size of a frame, in bytes."""

LEVEL: Final = 1
"""zstd level of directories, but for those where bytes matter more than time."""

SMALLEST_LEVELS: Final = ((1 << 12, LEVEL), (1 << 17, 17), (1 << 21, 15))
"""zstd levels of directories where bytes matter more, up to some bytes each; above, ``LEVEL``.
For 50 to 100 KiB, level 15 takes 3 to 10 ms and saves 7 to 13 %; level 17 takes 9 to 33 ms and
saves 1 to 7 % more. Below 4 KiB they save 3 % at most; for 2 MiB, level 15 takes 0.2 s."""

TABLE_LEVEL: Final = 19
"""zstd level of tables of classes, which are few: those of a frame take up to 50 ms."""

STREAM_PARAMETERS: Final[Mapping[str, int]] = {
    "strategy": zstandard.STRATEGY_FAST,
    "min_match": 7,
    "hash_log": 6,
    "window_log": 17,
}
"""zstd parameters of streams, whose matches mostly are noise: the smallest table of matches, and
the longest smallest match. Share of the raw size, and MB/s of one core, beside those of level 1
(2026-11, AMD EPYC, N(0, 0.02) weights, geometric gaps):

=================  ============  ============
stream             level 1       these
=================  ============  ============
dense.1, value.1   0.368,  304   0.340,   874
dense.0, value.0   1.000, 4480   1.000, 5180
gap16.1 at 0.1 %   0.441,  276   0.431,   802
gap16.1 at 0.2 %   0.364,  228   0.321,   338
gap8 at 0.3 %      0.685,  261   0.664,   517
gap8 at 1.2 %      0.937,  884   0.937,   759
gap8 at 3 %        0.819,  761   0.819,   770
sign               1.000, 7393   1.000, 7568
exception, 10 %    0.502,  262   0.485,   543
magnitude          0.282,  273   0.248,   254
wide.k             1.001, 1638   1.001, 1697
=================  ============  ============
"""

HELD: Final = 16
"""Number of frames cached by each thread: two for each possible stream of one tensor."""

_local = threading.local()
_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class Frames:
    """Offsets, sizes and digests of the frames of one stream.

    Attributes:
        start: Offset of the first frame in the object, in bytes.
        stored: Size of each frame in the object, in bytes.
        raw: Inflated size of each frame, in bytes; equal to ``stored`` without compression.
        digests: blake3 of the stored bytes of each frame.
    """

    start: int
    stored: tuple[int, ...]
    raw: tuple[int, ...]
    digests: tuple[str, ...]


def deflate(document: Buffer) -> bytes:
    """Compress a document to one zstd frame that declares its content size."""
    return _compressors().document.compress(document)


def deflate_directory(document: bytes, *, smallest: bool) -> bytes:
    """Compress a directory to one zstd frame that declares its content size.

    Args:
        document: The directory.
        smallest: Whether fewer bytes are worth the time of ``SMALLEST_LEVELS``.
    """
    fitting = (level for most, level in SMALLEST_LEVELS if len(document) <= most)
    level = next(fitting, LEVEL) if smallest else LEVEL
    if level == LEVEL:
        return deflate(document)
    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(document)


def deflate_stream(data: Buffer) -> bytes:
    """Compress a piece of a stream to one zstd frame that declares its content size."""
    return _compressors().stream.compress(data)


def deflate_changes(data: Buffer) -> bytes:
    """Compress a piece of a stream of changes, as a stream or as a document: the smaller frame.

    Where changes repeat, as in columns that change in every row, the larger table of matches of
    level 1 takes down to a hundredth of the bytes; else it takes up to a tenth more.
    """
    return min(deflate_stream(data), deflate(data), key=len)


def deflate_table(data: Buffer) -> bytes:
    """Compress tables of classes to one zstd frame that declares its content size.

    Level 19 takes 0.2 to 0.6 of the bytes of the parameters of streams, at 10 to 20 MB/s.
    """
    return zstandard.ZstdCompressor(level=TABLE_LEVEL, write_content_size=True).compress(data)


def largest_frame(nbytes: int) -> int:
    """Return the largest size of a zstd frame of ``nbytes`` bytes, both in bytes."""
    return nbytes + (nbytes >> 8) + 64


def inflate(frame: Buffer, nbytes: int, *, key: str = "") -> bytes:
    """Inflate one zstd frame to exactly ``nbytes`` bytes.

    The size declared by the frame is checked before any memory is allocated for it.

    Raises:
        MalformedError: The data is not a zstd frame, or inflates to another size.
    """
    try:
        claimed = zstandard.frame_content_size(frame)
        if claimed != nbytes:
            raise MalformedError(
                f"{key}: a frame claims {claimed} bytes, expected {nbytes}", key=key
            )
        data = _decompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise MalformedError(f"{key}: {exc}", key=key) from exc
    if len(data) != nbytes:
        raise MalformedError(f"{key}: a frame gave {len(data)} bytes, expected {nbytes}", key=key)
    return data


class StreamReader:
    """Reader of ranges of one inflated stream; thread-safe.

    Neighbouring tensors share frames. Each thread caches its latest inflated frames of all streams,
    so that reading tensors in order inflates each frame once.
    """

    def __init__(self, frames: Frames, read_at: ReadAt, *, compressed: bool, key: str) -> None:
        self._frames = frames
        self._read_at = read_at
        self._compressed = compressed
        self._key = key
        self._stored_at = _running(frames.start, frames.stored)
        self._raw_at = _running(0, frames.raw)
        self._id = next(_ids)

    @property
    def nbytes(self) -> int:
        """Inflated size of the stream, in bytes."""
        return self._raw_at[-1]

    def read(self, start: int, stop: int) -> Buffer:
        """Return the inflated bytes ``start:stop`` of the stream.

        Raises:
            DigestMismatchError: A frame differs from its digest in the directory.
            MalformedError: A frame does not inflate to the size in the directory.
        """
        if start == stop:
            return b""
        number = bisect_right(self._raw_at, start) - 1
        pieces: list[Buffer] = []
        for at, end in self.cuts(start, stop):
            base = self._raw_at[number]
            whole = end - at == self._frames.raw[number]
            pieces.append(memoryview(self.frame(number, keep=not whole))[at - base : end - base])
            number += 1
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def stored(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of the object that holds the frames of the bytes ``start:stop``."""
        first, last = bisect_right(self._raw_at, start) - 1, bisect_right(self._raw_at, stop - 1)
        return self._stored_at[first], self._stored_at[last]

    def check_range(self, start: int, stop: int) -> None:
        """Verify the frames of the bytes ``start:stop``, which are not none.

        Raises:
            DigestMismatchError: A frame differs from its digest in the directory.
        """
        first, last = bisect_right(self._raw_at, start) - 1, bisect_right(self._raw_at, stop - 1)
        for number in range(first, last):
            self.check(number)

    def cuts(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Split the range ``start:stop`` at the ends of frames."""
        number = bisect_right(self._raw_at, start) - 1
        while start < stop:
            end = min(stop, self._raw_at[number + 1])
            yield start, end
            start, number = end, number + 1

    def frame(self, number: int, *, keep: bool = True) -> Buffer:
        """Verify and inflate one frame; cache it with ``keep``, since a neighbour may need it."""
        held = _held_frames()
        data = held.get((self._id, number))
        if data is None:
            stored = self.check(number)
            raw = self._frames.raw[number]
            data = inflate(stored, raw, key=self._key) if self._compressed else stored
        else:
            del held[self._id, number]  # moved to the end: the most recent
        if keep:
            while len(held) >= HELD:
                held.popitem(last=False)
            held[self._id, number] = data
        return data

    def check(self, number: int) -> Buffer:
        """Verify one frame; return its stored bytes, read-only."""
        stored = memoryview(
            self._read_at(self._stored_at[number], self._frames.stored[number])
        ).toreadonly()
        expected, actual = self._frames.digests[number], object_digest(stored)
        if actual != expected:
            raise DigestMismatchError(
                f"{self._key}: frame {number}", expected=expected, actual=actual, key=self._key
            )
        return stored


def _running(start: int, sizes: tuple[int, ...]) -> list[int]:
    total = [start]
    for size in sizes:
        total.append(total[-1] + size)
    return total


def _held_frames() -> OrderedDict[tuple[int, int], Buffer]:
    if not hasattr(_local, "frames"):
        _local.frames = OrderedDict()
    frames: OrderedDict[tuple[int, int], Buffer] = _local.frames
    return frames


@dataclass(frozen=True, slots=True)
class _Compressors:
    document: zstandard.ZstdCompressor
    stream: zstandard.ZstdCompressor


def _compressors() -> _Compressors:
    """Return this thread's compressors: a context is expensive to create and not thread-safe."""
    if not hasattr(_local, "compressors"):
        parameters = zstandard.ZstdCompressionParameters(**STREAM_PARAMETERS, write_content_size=1)
        _local.compressors = _Compressors(
            document=zstandard.ZstdCompressor(level=LEVEL, write_content_size=True),
            stream=zstandard.ZstdCompressor(compression_params=parameters),
        )
    compressors: _Compressors = _local.compressors
    return compressors


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        # After an allocation of this size was freed, glibc keeps the pages of freed frames for the
        # next ones: 1,000 page faults instead of 30,000 while 480 MB of weights are decoded.
        bytes(16 * FRAME)
        _local.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _local.decompressor
    return decompressor
