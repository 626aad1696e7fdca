"""Tiles of many tensors in one buffer, as the kernels that decode ``max`` on a device read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deltachain.errors import BaseMismatchError
from deltachain.kernels.segments import Column, Plane, Table, empty_bytes, spans_of
from deltachain.kernels.tiles import BINS, ENDS, MAGNITUDES, NEVER, RANKS, Bytes, TileGrid

CLASS_NBYTES: Final = 2 * BINS + 32
"""Bytes of the classes of a tensor: the class and the size of each bin, and the rate of a class."""
PADDING: Final = 64
"""Bytes that are read behind the last tile, at most."""


class TileColumn(IntEnum):
    """Columns of :attr:`TileBatch.rows`."""

    SEGMENT = 0
    """Number of its segment."""
    TENSOR = 1
    """Number of its tensor in the batch."""
    AT = 2
    """Position of its first element in the old bits of the tensor."""
    START = 3
    """Flat index of that element."""
    ROWS = 4
    WIDTH = 5
    """Number of elements of a row."""
    STRIDE = 6
    """Elements from one row to the next, in the old bits and in the tensor."""
    SHIFT = 7
    MASK = 8
    """Right shift and mask of old bits that give a bin."""
    CLASSES = 9
    """Offset of the classes of its tensor."""
    COUNT = 10
    """Number of classes."""
    FIRST = 11
    """First byte of its segment."""
    NBYTES = 12
    """Number of bytes of the segment."""
    NUMBER = 13
    """Number of the tile in the segment."""
    CUTS = 14
    """Number of tiles of the segment."""


class TileReason(IntEnum):
    """Why the tiles of a segment are refused; of several reasons the largest is reported."""

    NONE = 0
    RANKS = 1
    MAGNITUDES = 2
    ENDS = 3


MESSAGES: Final[dict[TileReason, str]] = {
    TileReason.RANKS: RANKS,
    TileReason.MAGNITUDES: MAGNITUDES,
    TileReason.ENDS: ENDS,
}


@dataclass(frozen=True, slots=True, eq=False)
class TensorTiles:
    """Tiles of consecutive segments of one tensor; the content of ``data`` is untrusted.

    Attributes:
        tensor: Number of the tensor, chosen by the caller.
        segments: ``(n, 6)`` int64 rows of start, length, nnz, bytes, 0 and 0 that fit ``grid``.
        data: Bytes of all segments, end to end.
        table: ``(512,)`` rates and sizes, known to be canonical.
        grid: The tiles; old bits begin at its ``start``.
        stop: Flat index after the last of the old bits.
        wanted: ``(n, cuts)`` bool: tiles to decode; ``None`` for all.
        width: Bytes of an element.
    """

    tensor: int
    segments: Table
    data: Bytes
    table: Bytes
    grid: TileGrid
    stop: int
    wanted: npt.NDArray[np.bool_] | None
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes of all streams, and of the old bits, which may have to be copied."""
        return self.data.nbytes + self.table.nbytes + self.width * (self.stop - self.grid.start)


@dataclass(frozen=True, slots=True, eq=False)
class TileBatch:
    """Tiles of many tensors of one element width, in one buffer that is copied at once.

    Attributes:
        width: Bytes of an element.
        table: ``(segments + 1, 8)`` int64, see :class:`.segments.Column`: tensor, start, length and
            first given element of each segment. A view of the beginning of ``buffer``.
        rows: ``(tiles, 15)`` int64, see :class:`TileColumn`; a view of ``buffer`` behind it.
        buffer: Table, rows, the classes of all tensors, the bytes of all tiles, ``PADDING`` zeros.
        offsets: Offsets of rows, classes and bytes in ``buffer``, and its end; divisible by 8.
        tensors: The tensors, as they were packed.
        complete: ``(segments,)`` bool: whether all tiles of a segment are in the batch.
        lengths: Number of old bits that each tensor needs at least.
    """

    width: int
    table: Table
    rows: Table
    buffer: Plane
    offsets: tuple[int, int, int, int]
    tensors: tuple[TensorTiles, ...]
    complete: npt.NDArray[np.bool_]
    lengths: tuple[int, ...]

    def spans(self) -> Table:
        """Return the given elements of each tensor; see :func:`.segments.spans_of`."""
        return spans_of(self.table)

    def check(self, verdict: npt.NDArray[np.integer[Any]], names: Sequence[str]) -> None:
        """Raise the error of the first refused segment, if any.

        Args:
            verdict: A :class:`TileReason` for each segment.
            names: Names of the tensors, by number.

        Raises:
            BaseMismatchError: Tiles of a tensor cannot be decoded with its old bits.
        """
        bad = np.flatnonzero(verdict)
        if bad.size:
            row = self.table[bad[0]]
            name, start = names[int(row[Column.TENSOR])], int(row[Column.START])
            why = MESSAGES[TileReason(int(verdict[bad[0]]))]
            raise BaseMismatchError(
                f"{name!r} does not hold the bits before the segment at {start}: {why}", tensor=name
            )


def pack_tiles(
    tensors: Sequence[TensorTiles], allocate: Callable[[int], Plane] = empty_bytes
) -> TileBatch:
    """Copy the tiles of many tensors into one buffer.

    Args:
        tensors: At least one, of one element width, in the order of the output; numbers ascend.
        allocate: Function that returns that many bytes of memory, aligned to 8.
    """
    segments = np.concatenate([np.empty((0, 6), np.int64), *(t.segments for t in tensors)])
    owner = np.repeat(np.arange(len(tensors)), [len(t.segments) for t in tensors])
    table = np.zeros((len(segments) + 1, len(Column)), np.int64)
    table[:-1, Column.TENSOR] = np.array([t.tensor for t in tensors], np.int64)[owner]
    table[:-1, Column.START] = segments[:, 0]
    table[:-1, Column.LENGTH] = segments[:, 1]
    table[1:, Column.FIRST] = np.cumsum(segments[:, 2])
    classes = [_packed_classes(t.table) for t in tensors]
    rows, complete, before, nbytes = [], [], 0, 0
    for number, one in enumerate(tensors):
        mine, whole = _rows(one)
        mine[:, TileColumn.SEGMENT] += before
        mine[:, TileColumn.TENSOR] = number
        mine[:, TileColumn.CLASSES] = CLASS_NBYTES * number
        mine[:, TileColumn.COUNT] = classes[number][1]
        mine[:, TileColumn.FIRST] += nbytes
        before, nbytes = before + len(one.segments), nbytes + one.data.nbytes
        rows.append(mine)
        complete.append(whole)
    ordered = np.concatenate([np.empty((0, len(TileColumn)), np.int64), *rows])
    sizes = table.nbytes, ordered.nbytes, CLASS_NBYTES * len(tensors), nbytes + PADDING
    first, second, third, end = np.cumsum([n + -n % 8 for n in sizes]).tolist()
    buffer = allocate(end)
    buffer[third + nbytes :] = 0
    for at, array in ((0, table), (first, ordered)):
        buffer[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
    for number, (packed, _) in enumerate(classes):
        at = second + CLASS_NBYTES * number
        buffer[at : at + CLASS_NBYTES] = packed
    if nbytes:
        np.concatenate([one.data for one in tensors], out=buffer[third : third + nbytes])
    return TileBatch(
        width=tensors[0].width,
        table=buffer[: table.nbytes].view(np.int64).reshape(table.shape),
        rows=buffer[first : first + ordered.nbytes].view(np.int64).reshape(ordered.shape),
        buffer=buffer,
        offsets=(first, second, third, end),
        tensors=tuple(tensors),
        complete=np.concatenate([np.empty(0, np.bool_), *complete]),
        lengths=tuple(_length(one) for one in rows),
    )


def _packed_classes(table: Bytes) -> tuple[Bytes, int]:
    """Return the class and the size of each bin and the rate of each class; and their number."""
    rates = np.unique(table[:BINS])
    rates = rates[rates != NEVER]
    packed = np.full(CLASS_NBYTES, NEVER, np.uint8)
    members = table[:BINS] != NEVER
    packed[:BINS][members] = np.searchsorted(rates, table[:BINS][members])
    packed[BINS : 2 * BINS] = table[BINS:]
    packed[2 * BINS : 2 * BINS + rates.size] = rates
    return packed, int(rates.size)


def _rows(one: TensorTiles) -> tuple[Table, npt.NDArray[np.bool_]]:
    """Return the rows of a tensor's wanted tiles, and whether all tiles of a segment are wanted."""
    grid, count = one.grid, len(one.segments)
    cuts = grid.cuts
    wanted = np.ones((count, cuts), np.bool_) if one.wanted is None else one.wanted
    segment, number = np.nonzero(wanted)
    start, length = one.segments[segment, 0], one.segments[segment, 1]
    nbytes = one.segments[:, 3]
    rows = np.zeros((segment.size, len(TileColumn)), np.int64)
    rows[:, TileColumn.SEGMENT] = segment
    width = length if cuts == 1 else np.full_like(length, grid.columns // cuts)
    rows[:, TileColumn.START] = start + number * width
    rows[:, TileColumn.AT] = rows[:, TileColumn.START] - grid.start
    rows[:, TileColumn.ROWS] = 1 if cuts == 1 else length // grid.columns
    rows[:, TileColumn.WIDTH] = width
    rows[:, TileColumn.STRIDE] = 0 if cuts == 1 else grid.columns
    rows[:, TileColumn.SHIFT] = grid.shift
    rows[:, TileColumn.MASK] = grid.mask
    rows[:, TileColumn.FIRST] = (np.cumsum(nbytes) - nbytes)[segment]
    rows[:, TileColumn.NBYTES] = nbytes[segment]
    rows[:, TileColumn.NUMBER] = number
    rows[:, TileColumn.CUTS] = cuts
    whole: npt.NDArray[np.bool_] = np.all(wanted, axis=1)
    return rows, whole


def _length(rows: Table) -> int:
    """Return how many old bits some tiles of a tensor need."""
    at, count, width, stride = (
        rows[:, column]
        for column in (TileColumn.AT, TileColumn.ROWS, TileColumn.WIDTH, TileColumn.STRIDE)
    )
    return int((at + (count - 1) * stride + width).max(initial=0))
