"""Compiled kernels of the encoding ``max`` that divide tiles into classes.

For each class and each 64 elements of a tile, in order, a word says which of them are in the class:
their bins are compared as one vector. Sums over words then take ranks to positions, and back.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deltachain.kernels.compiling import compiled
from deltachain.kernels.tiles import BINS, MAX_RATE, NEVER, Bytes, TileGrid
from deltachain.kernels.words import WORD, popcount, range_mask
from deltachain.types import Bits

_U = np.uint64

_local = threading.local()


class ClassTable(NamedTuple):
    """Classes of the bins of one tensor.

    Attributes:
        rates: ``(n,)`` rate of each class, ascending.
        sizes: ``(256,)`` size of each bin.
        lows: First bin of each run of consecutive bins in one class, by class.
        spans: Number of its other bins.
        kinds: Number of its class.
        by_bin: ``(256,)`` number of each bin's class; ``NEVER`` without one.
    """

    rates: Bytes
    sizes: Bytes
    lows: Bytes
    spans: Bytes
    kinds: npt.NDArray[np.int64]
    by_bin: Bytes


class TileClasses(NamedTuple):
    """Classes of the elements of one tile.

    Attributes:
        members: ``(classes, words)``: bit ``n`` of word ``w`` is set if element ``64 w + n`` is
            in the class.
        totals: ``(classes,)`` number of elements of each class.
    """

    members: npt.NDArray[np.uint64]
    totals: npt.NDArray[np.int64]


@compiled
def _count(bits: Any, shift: Any, mask: Any, counts: Any) -> None:  # noqa: ANN401
    for i in range(bits.shape[0]):
        counts[np.uint8((bits[i] >> shift) & mask)] += 1


def count_bins(bits: Bits, shift: int, mask: int) -> npt.NDArray[np.int64]:
    """Count the elements of each bin, ``(256,)``."""
    counts = np.zeros(BINS, np.int64)
    kind = bits.dtype.type
    _count(bits, kind(shift), kind(mask), counts)
    return counts


@compiled
def bin_segment(old: Any, shape: Any, cuts: Any, rule: Any, codes: Any) -> None:  # noqa: ANN401
    """Write the bins of a segment of some rows and columns, one tile after the other.

    Row by row, since caches read ahead of consecutive elements only.
    """
    rows, columns = shape
    shift, mask = rule
    width = columns // cuts
    for row in range(rows):
        for t in range(cuts):
            there = old[row * columns + t * width : row * columns + (t + 1) * width]
            mine = codes[(t * rows + row) * width : (t * rows + row + 1) * width]
            for i in range(width):
                mine[i] = np.uint8((there[i] >> shift) & mask)


@compiled
def classify(codes: Any, size: Any, table: Any, tile: Any) -> None:  # noqa: ANN401
    """Divide the elements of a tile into classes; behind their bins is room for a word."""
    words = (size + WORD - 1) // WORD
    before = -1
    for run in range(table.lows.shape[0]):
        low, span, kind = table.lows[run], table.spans[run], table.kinds[run]
        members = tile.members[kind]
        if kind == before:
            for w in range(words):
                members[w] |= range_mask(codes, WORD * w, low, span)
        else:
            for w in range(words):
                members[w] = range_mask(codes, WORD * w, low, span)
        before = kind
    for kind in range(tile.totals.shape[0]):
        members, total = tile.members[kind], np.int64(0)
        if size & (WORD - 1):
            members[words - 1] &= (_U(1) << _U(size & (WORD - 1))) - _U(1)
        for w in range(words):
            total += popcount(members[w])
        tile.totals[kind] = total


def rule_of(grid: TileGrid, old: Bits) -> tuple[Any, Any]:
    """Return shift and mask of a bin in the dtype of the bits."""
    kind = old.dtype.type
    return kind(grid.shift), kind(grid.mask)


def class_table(table: Bytes) -> ClassTable:
    """Return the classes of the rates and sizes of a tensor."""
    by_rate = table[:BINS]
    rates = np.unique(by_rate[by_rate != NEVER])
    by_bin = np.full(BINS, NEVER, np.uint8)
    for number, rate in enumerate(rates.tolist()):
        by_bin[by_rate == rate] = number
    starts = np.concatenate([[0], np.flatnonzero(by_bin[1:] != by_bin[:-1]) + 1])
    spans = np.diff(starts, append=BINS) - 1
    order = np.argsort(by_bin[starts], kind="stable")
    order = order[by_bin[starts[order]] != NEVER]
    lows = starts[order]
    return ClassTable(
        rates=rates,
        sizes=np.ascontiguousarray(table[BINS:]),
        lows=lows.astype(np.uint8),
        spans=spans[order].astype(np.uint8),
        kinds=by_bin[lows].astype(np.int64),
        by_bin=by_bin,
    )


class SegmentScratch(NamedTuple):
    """Memory of one thread for the work on a segment: fresh pages cost more than the work.

    Attributes:
        words: Number of words of the largest segment so far.
        marks: A bit for each element of the segment; zero between uses.
        steps: Room for the step of each element.
        codes: Room for the bins of all tiles, and for a word behind them.
        members: Room for the words of each class.
    """

    words: int
    marks: npt.NDArray[np.uint64]
    steps: npt.NDArray[np.uint64]
    codes: Bytes
    members: npt.NDArray[np.uint64]

    def tile(self, classes: int) -> TileClasses:
        """Return room for the classes of a tile."""
        return TileClasses(self.members, np.empty(classes, np.int64))


def thread_scratch(length: int) -> SegmentScratch:
    """Return this thread's memory for segments of some length."""
    words = -(-max(length, 1) // WORD)
    held: SegmentScratch | None = getattr(_local, "held", None)
    if held is None or held.words < words:
        held = SegmentScratch(
            words=words,
            marks=np.zeros(words, np.uint64),
            steps=np.empty(WORD * words, np.uint64),
            codes=np.empty(WORD * (words + 1), np.uint8),
            members=np.empty((MAX_RATE + 1, words), np.uint64),
        )
        _local.held = held
    return held
