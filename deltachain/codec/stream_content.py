"""Content of a stream before its compression: pieces of arrays, joined a frame at a time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from deltachain.codec.frames import (
    FRAME,
    deflate_changes,
    deflate_stream,
    deflate_table,
)
from deltachain.format.digest import object_digest
from deltachain.kernels import host
from deltachain.types import Bits, Buffer

FlatArray: TypeAlias = npt.NDArray[Any]
"""A one-dimensional array of any dtype."""


WITHOUT_REPEATS: Final = frozenset(["class", "dense", "tile"])
"""Streams of coded places, and of weights: they are large, and nothing in them repeats."""


class BytePlane(NamedTuple):
    """One byte of every element.

    Attributes:
        values: Unsigned integers, shape ``(n,)``.
        k: Number of the byte in each element, 0 for the lowest.
    """

    values: Bits
    k: int


StreamPiece: TypeAlias = FlatArray | BytePlane
"""Bytes, booleans of a stream of bits, or a byte plane, which is split when it is read."""


class StoredFrame(NamedTuple):
    """One frame as stored in a part.

    Attributes:
        stored: Its bytes.
        nbytes: Its inflated size, in bytes.
        digest: blake3 of ``stored``.
    """

    stored: Buffer
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class StreamContent:
    """Content of one stream, not yet compressed. Frames may be made by several threads.

    Attributes:
        name: Name of the entry in the file.
        dtype: Wire dtype of the entry.
        shape: Dimensions of the entry if it is not compressed.
        pieces: The content, in order, without empty pieces.
        ends: Elements up to the end of each piece.
        in_bits: Whether the pieces are booleans, stored as bits.
        sizes: Inflated sizes of the frames, in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[StreamPiece]
    ends: Sequence[int]
    in_bits: bool
    sizes: tuple[int, ...]

    @classmethod
    def join(
        cls,
        name: str,
        pieces: Iterable[StreamPiece],
        *,
        dtype: str = "U8",
        shape: tuple[int, ...] | None = None,
        in_bits: bool = False,
    ) -> StreamContent:
        """Return the content of all pieces; the shape is one-dimensional by default."""
        filled = [piece for piece in pieces if _size(piece)]
        ends = list(accumulate(map(_size, filled)))
        size = ends[-1] if ends else 0
        nbytes = -(-size // 8) if in_bits else size
        sizes = tuple(min(FRAME, nbytes - at) for at in range(0, nbytes, FRAME))
        return cls(name, dtype, (nbytes,) if shape is None else shape, filled, ends, in_bits, sizes)

    @property
    def nbytes(self) -> int:
        """Size of the content, in bytes."""
        return sum(self.sizes)

    def frame(self, number: int, *, compress: bool) -> StoredFrame:
        """Return one frame, compressed or as it is."""
        start = number * FRAME
        raw = self.read(start, start + self.sizes[number]).data
        stored = self._deflate(raw) if compress else raw
        return StoredFrame(stored, raw.nbytes, object_digest(stored))

    def _deflate(self, raw: memoryview) -> bytes:
        stream = self.name.partition(".")[2].partition(".")[0]
        if stream == "class":
            return deflate_table(raw)
        return deflate_stream(raw) if stream in WITHOUT_REPEATS else deflate_changes(raw)

    def read(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return the bytes ``start:stop``; they share memory with a piece that has all of them."""
        if self.in_bits:
            flags = self._join(8 * start, min(8 * stop, self.ends[-1]), np.bool_)
            return np.packbits(flags, bitorder="little")
        return self._join(start, stop, np.uint8)

    def _join(self, start: int, stop: int, dtype: Any) -> npt.NDArray[Any]:  # noqa: ANN401
        first, last = bisect_right(self.ends, start), bisect_left(self.ends, stop)
        pieces = list(self.pieces[first : last + 1])
        pieces[-1] = _part(pieces[-1], 0, stop - self.ends[last] + _size(pieces[-1]))
        begin = self.ends[first - 1] if first else 0
        pieces[0] = _part(pieces[0], start - begin, _size(pieces[0]))
        plain = [piece for piece in pieces if not isinstance(piece, BytePlane)]
        if len(plain) == len(pieces):
            return np.concatenate(plain) if len(plain) > 1 else np.ascontiguousarray(plain[0])
        out: npt.NDArray[Any] = np.empty(stop - start, dtype)
        at = 0
        for piece in pieces:
            there = out[at : at + _size(piece)]
            if isinstance(piece, BytePlane):
                host.copy_plane_(there, piece.values, piece.k)
            else:
                there[:] = piece
            at += there.size
        return out


def _size(piece: StreamPiece) -> int:
    return int(piece.values.size if isinstance(piece, BytePlane) else piece.size)


def _part(piece: StreamPiece, low: int, high: int) -> StreamPiece:
    if isinstance(piece, BytePlane):
        return BytePlane(piece.values[low:high], piece.k)
    return piece[low:high]
