"""Content of a stream before its compression: pieces of arrays, joined a frame at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from deltachain.codec.frames import FRAME, deflate_stream
from deltachain.format.digest import object_digest
from deltachain.kernels import host
from deltachain.types import Bits, Buffer

FlatArray: TypeAlias = npt.NDArray[Any]
"""A one-dimensional array of any dtype."""


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
        pieces: The content, in order.
        in_bits: Whether the pieces are booleans, stored as bits.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[StreamPiece]
    ends: Sequence[int]
    in_bits: bool

    @classmethod
    def join(
        cls,
        name: str,
        pieces: Sequence[StreamPiece],
        *,
        dtype: str = "U8",
        shape: tuple[int, ...] | None = None,
        in_bits: bool = False,
    ) -> StreamContent:
        """Return the content of all pieces; the shape is one-dimensional by default."""
        ends = list(accumulate(map(_size, pieces)))
        nbytes = _nbytes(ends, in_bits=in_bits)
        return cls(name, dtype, (nbytes,) if shape is None else shape, pieces, ends, in_bits)

    @property
    def nbytes(self) -> int:
        """Size of the content, in bytes."""
        return _nbytes(self.ends, in_bits=self.in_bits)

    @property
    def sizes(self) -> list[int]:
        """Inflated sizes of the frames, in bytes."""
        nbytes = self.nbytes
        return [min(FRAME, nbytes - at) for at in range(0, nbytes, FRAME)]

    def frame(self, number: int, *, compress: bool) -> StoredFrame:
        """Return one frame, compressed or as it is."""
        start = number * FRAME
        raw = self.read(start, min(start + FRAME, self.nbytes)).data
        stored = deflate_stream(raw) if compress else raw
        return StoredFrame(stored, raw.nbytes, object_digest(stored))

    def read(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return the bytes ``start:stop``; they share memory with a piece that has all of them."""
        if self.in_bits:
            flags = self._join(8 * start, min(8 * stop, self.ends[-1]), np.bool_)
            return np.packbits(flags, bitorder="little")
        return self._join(start, stop, np.uint8)

    def _join(self, start: int, stop: int, dtype: Any) -> npt.NDArray[Any]:  # noqa: ANN401
        number = bisect_right(self.ends, start)
        first = self.pieces[number]
        begin = self.ends[number] - _size(first)
        if stop <= self.ends[number] and not isinstance(first, BytePlane):
            return np.ascontiguousarray(first[start - begin : stop - begin])
        out: npt.NDArray[Any] = np.empty(stop - start, dtype)
        at = start
        while at < stop:
            piece, end = self.pieces[number], self.ends[number]
            low, high = at - end + _size(piece), min(stop, end) - end + _size(piece)
            there = out[at - start : min(stop, end) - start]
            if isinstance(piece, BytePlane):
                host.copy_plane_(there, piece.values[low:high], piece.k)
            else:
                there[:] = piece[low:high]
            at, number = min(stop, end), number + 1
        return out


def _size(piece: StreamPiece) -> int:
    return int(piece.values.size if isinstance(piece, BytePlane) else piece.size)


def _nbytes(ends: Sequence[int], *, in_bits: bool) -> int:
    size = ends[-1] if ends else 0
    return -(-size // 8) if in_bits else size
