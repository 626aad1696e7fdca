"""Blocks of a matrix that share a scale: pure index arithmetic.

The grid of a matrix has a block for every scale. A rank holds a *window* of the matrix, whose edge
may cut blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from deltachain.publish.model.layout import Box

BAND_NUMEL: Final = 1 << 21
"""Elements quantised at a time, unless a row of blocks has more: bounds what libraries allocate."""


class Band(NamedTuple):
    """Consecutive rows of a window, and the rows of its blocks.

    Attributes:
        rows: Rows of the window.
        blocks: Rows of blocks of the window that they are in.
        before: Rows of the first blocks that precede the band.
        after: Rows of the last blocks that follow the band.
    """

    rows: slice
    blocks: slice
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Grid:
    """Blocks of a matrix.

    Attributes:
        full: Rows and columns of the matrix.
        given: Rows and columns of a block, 0 for all; blocks at the end may have fewer.
    """

    full: tuple[int, int]
    given: tuple[int, int]

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        return self.given[0] or max(1, self.full[0]), self.given[1] or max(1, self.full[1])

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of blocks."""
        (n, k), (rows, columns) = self.full, self.block
        return -(-n // rows), -(-k // columns)

    def first(self, window: Box) -> tuple[int, int]:
        """Return the block of the first element of a window."""
        return window.offset[0] // self.block[0], window.offset[1] // self.block[1]

    def counts(self, window: Box) -> tuple[int, int]:
        """Return the rows and columns of blocks with elements in a window."""
        ends = [-(-(at + n) // b) for at, n, b in self._dims(window)]
        (row, column), empty = self.first(window), not window.numel
        return (0, 0) if empty else (ends[0] - row, ends[1] - column)

    def margins(self, window: Box) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return how far the blocks extend beyond a window: above and below, left and right.

        Blocks at the end of the matrix count as whole. A dimension of which a block has all has no
        margins.
        """
        rows, columns = (
            (at % b, -(at + n) % b) if given else (0, 0)
            for given, (at, n, b) in zip(self.given, self._dims(window), strict=True)
        )
        return rows, columns

    def cut(self, window: Box) -> npt.NDArray[np.bool_]:
        """Return which blocks of a window have elements outside it, in the shape of ``counts``."""
        sides = []
        for count, first, full, (at, n, b) in zip(
            self.counts(window), self.first(window), self.full, self._dims(window), strict=True
        ):
            starts = (np.arange(count) + first) * b
            sides.append((starts < at) | (np.minimum(starts + b, full) > at + n))
        return np.logical_or.outer(sides[0], sides[1])

    def owned(self, window: Box) -> Box:
        """Return the blocks whose first element is in a window, as a box of the grid.

        Windows that tile the matrix own every block once.
        """
        starts = [-(-at // b) for at, _, b in self._dims(window)]
        stops = [-(-(at + n) // b) for at, n, b in self._dims(window)]
        counts = [max(0, stop - start) for start, stop in zip(starts, stops, strict=True)]
        if not (window.numel and math.prod(counts)):
            return Box(self.shape, (0, 0), (0, 0))
        return Box(self.shape, (starts[0], starts[1]), (counts[0], counts[1]))

    def bands(self, window: Box) -> Iterator[Band]:
        """Yield all rows of a window in bands of about ``BAND_NUMEL`` elements.

        A band has whole rows of blocks, as far as the window has them; any rows, if a block has
        all rows of the matrix.
        """
        if not window.numel:
            return
        (rows, columns), (above, below) = window.shape, self.margins(window)[0]
        height, limit = self.block[0], max(1, BAND_NUMEL // columns)
        if not self.given[0]:
            for low in range(0, rows, limit):
                yield Band(slice(low, min(low + limit, rows)), slice(0, 1), 0, 0)
            return
        step, count = max(1, limit // height), self.counts(window)[0]
        for first in range(0, count, step):
            last = min(first + step, count)
            low, high = max(0, first * height - above), min(last * height - above, rows)
            after = below if last == count else 0
            yield Band(slice(low, high), slice(first, last), 0 if first else above, after)

    def _dims(self, window: Box) -> Iterator[tuple[int, int, int]]:
        yield from zip(window.offset, window.shape, self.block, strict=True)
