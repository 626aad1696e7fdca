"""Streams of bytes as independent frames of at most 1 MiB, each with its own digest.

A reader verifies and inflates only the frames it needs; several can be inflated at once.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import zstandard

from deltachain.codec.container import ReadAt
from deltachain.errors import DigestMismatchError, MalformedError
from deltachain.format.digest import object_digest
from deltachain.types import Buffer

FRAME: Final = 1 << 20
"""Most bytes a frame inflates to."""

LEVEL: Final = 1
"""zstd level: higher ones cost ten times the time for at most 2 % (measured, codec study 3d)."""

HELD: Final = 16
"""Frames that each thread keeps: two for each stream that one tensor can have."""

_local = threading.local()
_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class Frames:
    """Offsets, sizes and digests of the frames of one stream.

    Attributes:
        start: Offset of the first frame in the object.
        stored: Bytes of each frame in the object.
        raw: Bytes of each frame inflated; equal to ``stored`` where frames are not compressed.
        digests: blake3 of each frame as stored.
    """

    start: int
    stored: tuple[int, ...]
    raw: tuple[int, ...]
    digests: tuple[str, ...]


def cut(data: Buffer, *, compress: bool) -> tuple[list[Buffer], list[int]]:
    """Cut a stream into frames; return them as stored, and the inflated size of each."""
    view = memoryview(data).cast("B")
    pieces = [view[at : at + FRAME] for at in range(0, len(view), FRAME)]
    stored: list[Buffer] = [deflate(piece) for piece in pieces] if compress else list(pieces)
    return stored, [len(piece) for piece in pieces]


def deflate(data: Buffer) -> bytes:
    """Compress to one zstd frame that states the size of its content."""
    return _compressor().compress(data)


def inflate(frame: Buffer, nbytes: int, *, key: str = "") -> bytes:
    """Inflate one zstd frame that must give exactly ``nbytes``.

    The size that the frame itself claims is checked before any memory is taken for it.

    Raises:
        MalformedError: It is not a zstd frame, or inflates to another number of bytes.
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
    """Reads ranges of one inflated stream, from any thread.

    Neighbouring tensors share frames. Each thread caches the frames that it inflated last, of all
    streams, so that reading tensors in order inflates each frame once.
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
        """Inflated length of the stream."""
        return self._raw_at[-1]

    def read(self, start: int, stop: int) -> Buffer:
        """Return the inflated bytes ``start:stop`` of the stream.

        Raises:
            DigestMismatchError: A frame is not the one the directory names.
            MalformedError: A frame does not inflate to what the directory says.
        """
        if start == stop:
            return b""
        number = bisect_right(self._raw_at, start) - 1
        pieces: list[Buffer] = []
        for at, end in self.cuts(start, stop):
            base = self._raw_at[number]
            pieces.append(memoryview(self.frame(number))[at - base : end - base])
            number += 1
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def cuts(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Cut the range ``start:stop`` at the ends of frames."""
        number = bisect_right(self._raw_at, start) - 1
        while start < stop:
            end = min(stop, self._raw_at[number + 1])
            yield start, end
            start, number = end, number + 1

    def frame(self, number: int) -> Buffer:
        """Return one frame, verified and inflated."""
        held = _held_frames()
        data = held.get((self._id, number))
        if data is None:
            stored = self.check(number)
            raw = self._frames.raw[number]
            data = inflate(stored, raw, key=self._key) if self._compressed else stored
            while len(held) >= HELD:
                held.popitem(last=False)
        else:
            del held[self._id, number]  # it is the latest again
        held[self._id, number] = data
        return data

    def check(self, number: int) -> Buffer:
        """Verify one frame; return it as stored."""
        stored = self._read_at(self._stored_at[number], self._frames.stored[number])
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


def _compressor() -> zstandard.ZstdCompressor:
    """Return this thread's compressor: a context is costly to make and not thread-safe."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
    compressor: zstandard.ZstdCompressor = _local.compressor
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _local.decompressor
    return decompressor
