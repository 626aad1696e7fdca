"""Compiled kernels of the encoding ``max`` that divide tiles into classes.

For each class and each 64 elements of a tile, in order, a word says which of them are in the class:
their bins are compared as one vector. Sums over words then take ranks to positions, and back. The
words of a span lie side by side, so that they stay in cache.
"""

from __future__ import annotations

import threading
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from deltachain.kernels.compiling import compiled
from deltachain.kernels.tiles import BINS, MAX_CUTS, MAX_RATE, NEVER, Bytes, TileGrid
from deltachain.kernels.words import (
    WORD,
    bin_word,
    count_eight,
    equal_mask,
    range_mask,
)
from deltachain.types import Bits

_U = np.uint64

SPAN: Final = 4096
"""Elements of a tile that are divided into classes at a time."""
BLOCK: Final = 8 * WORD
"""Elements of a span that are counted together."""
TILE_GAP: Final = SPAN + 9 * WORD
"""Bytes between the bins of two tiles: more than a span has."""
SPAN_WORDS: Final = SPAN // WORD
SPAN_BLOCKS: Final = SPAN // BLOCK
"""Words and blocks of a span."""

_local = threading.local()


class ClassTable(NamedTuple):
    """Classes of the bins of one tensor.

    Attributes:
        rates: ``(n,)`` rate of each class, ascending.
        sizes: ``(256,)`` size of each bin.
        lows: First bin of each run of consecutive bins in one class, by class.
        spans: Number of its other bins.
        fold: 127 if bins that differ in the highest bit alone are in one class, as codes of both
            signs: runs are then of the lower half. Else 255.
        kinds: Number of its class.
        by_bin: ``(256,)`` number of each bin's class; ``NEVER`` without one.
        common: ``(n,)`` size of the first bin of each class.
        mixed: ``(n,)`` bool, whether bins of the class have different sizes.
    """

    rates: Bytes
    sizes: Bytes
    lows: Bytes
    spans: Bytes
    fold: np.uint8
    kinds: npt.NDArray[np.int64]
    by_bin: Bytes
    common: Bytes
    mixed: npt.NDArray[np.bool_]


class TileClasses(NamedTuple):
    """Classes of the elements of one tile, by span.

    Attributes:
        members: Words of the first class of the first span, of its second class, ...: bit ``n`` of
            word ``w`` is set if element ``64 w + n`` of the span is in the class.
        before: For each class of a span, and each block of the span: elements of the class before
            it in the span.
        starts: ``(classes, spans + 1)`` elements of each class before each span; the last number
            in use is that of the class.
    """

    members: npt.NDArray[np.uint64]
    before: npt.NDArray[np.uint16]
    starts: npt.NDArray[np.int64]


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
def bin_segment(old: Any, shape: Any, cuts: Any, rule: Any, codes: Any) -> Any:  # noqa: ANN401
    """Write the bins of a segment of some rows and columns, one tile after the other.

    Row by row, since caches read ahead of consecutive elements only. Returns the distance of two
    tiles: not a power of two, so that rows of all tiles stay in the first cache beside each other.
    """
    rows, columns = shape
    shift, mask = rule
    width = columns // cuts
    apart = rows * width + TILE_GAP
    words = width & -WORD
    for row in range(rows):
        for t in range(cuts):
            at, to = row * columns + t * width, t * apart + row * width
            for i in range(0, words, WORD):
                bin_word(old, at + i, rule, codes, to + i)
            for i in range(words, width):
                codes[_U(to + i)] = np.uint8((old[_U(at + i)] >> shift) & mask)
    return apart


@compiled
def classify(codes: Any, first: Any, size: Any, table: Any, tile: Any) -> Any:  # noqa: ANN401
    """Divide the elements of a tile into classes; return the number of spans.

    Their bins begin at ``codes[first]``; behind them there is room for a span. Nothing is sliced:
    each slice would count references to its array.
    """
    spans, count = (size + SPAN - 1) // SPAN, tile.starts.shape[0]
    for number in range(spans):
        before, there, left = np.int64(-1), first + SPAN * number, size - SPAN * number
        for run in range(table.lows.shape[0]):
            low, more, kind = table.lows[run], table.spans[run], table.kinds[run]
            bins = low, more, table.fold
            at = SPAN_WORDS * (number * count + kind)
            if kind == before:
                for w in range(SPAN_WORDS):
                    tile.members[_U(at + w)] |= range_mask(codes, there + WORD * w, bins)
            elif more == 0 and table.fold == np.uint8(255):
                for w in range(SPAN_WORDS):
                    tile.members[_U(at + w)] = equal_mask(codes, there + WORD * w, low)
            else:
                for w in range(SPAN_WORDS):
                    tile.members[_U(at + w)] = range_mask(codes, there + WORD * w, bins)
            before = kind
        for kind in range(count):
            at, total = number * count + kind, np.int64(0)
            if left < SPAN:
                last = SPAN_WORDS * at + left // WORD
                tile.members[_U(last)] &= (_U(1) << _U(left % WORD)) - _U(1)
                for w in range(last + 1, SPAN_WORDS * (at + 1)):
                    tile.members[_U(w)] = _U(0)
            for block in range(SPAN_BLOCKS):
                tile.before[_U(SPAN_BLOCKS * at + block)] = total
                total += count_eight(tile.members, SPAN_WORDS * at + 8 * block)
            tile.starts[kind, number + 1] = tile.starts[kind, number] + total
    return spans


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
    half = BINS // 2
    fold = half - 1 if (by_bin[:half] == by_bin[half:]).all() else BINS - 1
    there = by_bin[: fold + 1]
    starts = np.concatenate([[0], np.flatnonzero(there[1:] != there[:-1]) + 1])
    spans = np.diff(starts, append=len(there)) - 1
    order = np.argsort(by_bin[starts], kind="stable")
    order = order[by_bin[starts[order]] != NEVER]
    lows = starts[order]
    sizes = [table[BINS:][by_rate == rate] for rate in rates]
    return ClassTable(
        rates=rates,
        sizes=np.ascontiguousarray(table[BINS:]),
        lows=lows.astype(np.uint8),
        spans=spans[order].astype(np.uint8),
        fold=np.uint8(fold),
        kinds=by_bin[lows].astype(np.int64),
        by_bin=by_bin,
        common=np.array([some[0] for some in sizes], np.uint8),
        mixed=np.array([bool((some != some[0]).any()) for some in sizes], np.bool_),
    )


class SegmentScratch(NamedTuple):
    """Memory of one thread for the work on a segment: fresh pages cost more than the work.

    Attributes:
        spans: Number of spans of the largest segment so far.
        marks: A bit for each element of the segment; zero between uses.
        counts: Room for a number for each word of them.
        positions: Room for a place of each element.
        steps: Room for the step of each element.
        codes: Room for the bins of up to 64 tiles.
        listed: Room for positions of the elements of a class.
        members: Room for the words of each class.
        before: Room for the numbers of each class in front of each block.
    """

    spans: int
    marks: npt.NDArray[np.uint64]
    counts: npt.NDArray[np.uint32]
    positions: npt.NDArray[np.int32]
    steps: npt.NDArray[np.uint64]
    codes: Bytes
    listed: npt.NDArray[np.int32]
    members: npt.NDArray[np.uint64]
    before: npt.NDArray[np.uint16]

    def tile(self, classes: int) -> TileClasses:
        """Return room for the classes of a tile."""
        starts = np.zeros((classes, self.spans + 1), np.int64)
        return TileClasses(self.members, self.before, starts)


def thread_scratch(length: int) -> SegmentScratch:
    """Return this thread's memory for segments of some length."""
    spans = -(-max(length, 1) // SPAN)
    held: SegmentScratch | None = getattr(_local, "held", None)
    if held is None or held.spans < spans:
        held = SegmentScratch(
            spans=spans,
            marks=np.zeros(SPAN_WORDS * spans, np.uint64),
            counts=np.empty(SPAN_WORDS * spans, np.uint32),
            positions=np.empty(SPAN * spans, np.int32),
            steps=np.empty(SPAN * spans, np.uint64),
            codes=np.empty(SPAN * spans + MAX_CUTS * TILE_GAP, np.uint8),
            listed=np.empty(SPAN * spans + 1, np.int32),
            members=np.empty((MAX_RATE + 1) * SPAN_WORDS * spans, np.uint64),
            before=np.empty((MAX_RATE + 1) * SPAN_BLOCKS * spans, np.uint16),
        )
        _local.held = held
    return held
