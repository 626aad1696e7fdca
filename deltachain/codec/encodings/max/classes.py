"""Compiled kernels of the encoding ``max`` that divide tiles into classes.

For each class and each 64 elements of a tile, in order, a word says which of them are in the class:
their bins are compared as one vector. Sums over words then take ranks to positions, and back. The
words of a span lie side by side, so that they stay in cache.
"""

import threading
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from deltachain.codec.encodings.max.tiles import BINS, MAX_CUTS, MAX_RATE, NEVER, Bytes, TileGrid
from deltachain.kernels.compiling import compiled, inlined
from deltachain.types import Bits

_U = np.uint64
_intrinsic: Final[Any] = intrinsic  # untyped

WORD: Final = 64  # bits of a word
_PAIRS, _FOURS = _U(0x5555555555555555), _U(0x3333333333333333)
_BYTES, _LOW, _HIGH = _U(0x0F0F0F0F0F0F0F0F), _U(0x0101010101010101), _U(0x8080808080808080)
_PLACES: Final = np.array(
    [[[n for n in range(8) if b >> n & 1][r : r + 1] or [0] for r in range(8)] for b in range(256)],
    np.uint8,
).reshape(256, 8)
"""Number of the one bit of each rank in each byte."""


@compiled
def popcount(word: Any) -> Any:
    word = word - ((word >> _U(1)) & _PAIRS)
    word = (word & _FOURS) + ((word >> _U(2)) & _FOURS)
    return np.int64((((word + (word >> _U(4))) & _BYTES) * _LOW) >> _U(56))


@compiled
def lowest(word: Any) -> Any:
    """Return the number of the lowest one bit of a uint64; 64 if there is none."""
    return popcount(~word & (word - _U(1)))


@compiled
def select(word: Any, rank: Any) -> Any:
    """Return the number of the one bit of a rank in a word that has it."""
    sums = word - ((word >> _U(1)) & _PAIRS)
    sums = (sums & _FOURS) + ((sums >> _U(2)) & _FOURS)
    sums = ((sums + (sums >> _U(4))) & _BYTES) * _LOW  # one bits up to the end of each byte
    full = (((_U(rank) * _LOW) | _HIGH) - sums) & _HIGH
    place = _U(8 * popcount(full))
    before = ((sums << _U(8)) >> place) & _U(255)
    return np.int64(place) + np.int64(_PLACES[(word >> place) & _U(255), _U(rank) - before])


@inlined
def load_word(data: Any, at: Any) -> Any:
    """Return the eight bytes from ``data[at]`` on, the lowest first, as a uint64."""
    word = _U(0)
    for n in range(8):
        word |= _U(data[_U(at + n)]) << _U(8 * n)
    return word


@_intrinsic
def run_mask(typing_context: Any, codes: Any, at: Any, run: Any) -> Any:  # noqa: ARG001
    """Compare 64 bytes from ``codes[at]`` on; bit ``n`` is set if byte ``n`` is in a run.

    A run is its first value, the number of its others, and a mask: 255, or 127 where the values
    with another highest bit are in it too. A loop over bytes takes seven times as long (2026-11).
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = ir.VectorType(ir.IntType(8), WORD)
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.bitcast(builder.gep(data, [args[1]]), lanes.as_pointer())
        low, more, mask = (_splat(builder, builder.extract_value(args[2], n)) for n in range(3))
        above = builder.and_(builder.sub(builder.load(place, align=1), low), mask)
        return builder.bitcast(builder.icmp_unsigned("<=", above, more), ir.IntType(WORD))

    return types.uint64(codes, types.int64, run), generate


def _splat(builder: Any, value: Any) -> Any:
    none = ir.Constant(ir.VectorType(ir.IntType(8), WORD), ir.Undefined)
    one = builder.insert_element(none, value, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), WORD), None)
    return builder.shuffle_vector(one, none, zeros)


SPAN: Final = 4096  # elements of a tile that are divided into classes at a time
TILE_GAP: Final = SPAN + 9 * WORD  # bytes between the bins of two tiles: more than a span has
SPAN_WORDS: Final = SPAN // WORD  # words of a span
_LINE: Final = 64  # bytes of a line of the caches
_local = threading.local()


class ClassTable(NamedTuple):
    """Classes of the bins of one tensor."""

    rates: Bytes  # `(n,)` rate of each class, ascending
    sizes: Bytes  # `(256,)` size of each bin
    lows: Bytes  # first bin of each run of consecutive bins in one class, by class
    spans: Bytes  # number of its other bins
    # 127 if bins that differ in the highest bit alone are in one class, as codes of both signs:
    # runs are then of the lower half. Else 255.
    fold: np.uint8
    kinds: npt.NDArray[np.int64]  # number of its class
    by_bin: Bytes  # `(256,)` number of each bin's class; `NEVER` without one
    common: Bytes  # `(n,)` size of the first bin of each class
    mixed: npt.NDArray[np.bool_]  # `(n,)` bool, whether bins of the class have different sizes


class TileClasses(NamedTuple):
    """Classes of the elements of one tile, by span.

    Attributes:
        members: Words of the first class of the first span, of its second class, ...: bit ``n`` of
            word ``w`` is set if element ``64 w + n`` of the span is in the class.
        before: For each word: elements of its class before it in the span.
        starts: ``(21, spans + 1)`` elements of each class before each span; the last number in use
            is that of the class. Zero before the first.
    """

    members: npt.NDArray[np.uint64]
    before: npt.NDArray[np.uint16]
    starts: npt.NDArray[np.int64]


@compiled
def _count(bits: Any, shift: Any, mask: Any, counts: Any) -> None:
    for i in range(bits.shape[0]):
        counts[np.uint8((bits[i] >> shift) & mask)] += 1


def count_bins(bits: Bits, shift: int, mask: int) -> npt.NDArray[np.int64]:
    counts = np.zeros(BINS, np.int64)
    kind = bits.dtype.type
    _count(bits, kind(shift), kind(mask), counts)
    return counts


@compiled
def bin_segment(old: Any, shape: Any, cuts: Any, rule: Any, codes: Any) -> Any:
    """Write the bins of a segment of some rows and columns, one tile after the other.

    Row by row, since caches read ahead of consecutive elements only. Returns the distance of two
    tiles: not a power of two, so that rows of all tiles stay in the first cache beside each other.
    """
    rows, columns = shape
    shift, mask = rule
    width = columns // cuts
    apart = rows * width + TILE_GAP
    for row in range(rows):
        for t in range(cuts):
            at, to = row * columns + t * width, t * apart + row * width
            for i in range(width):
                codes[_U(to + i)] = np.uint8((old[_U(at + i)] >> shift) & mask)
    return apart


@compiled
def classify(codes: Any, first: Any, size: Any, table: Any, tile: Any) -> Any:
    """Divide the elements of a tile into classes; return the number of spans.

    Their bins begin at ``codes[first]``; behind them there is room for a span. Nothing is sliced:
    each slice would count references to its array.
    """
    spans, count = (size + SPAN - 1) // SPAN, table.rates.shape[0]
    for number in range(spans):
        before, there, left = np.int64(-1), first + SPAN * number, size - SPAN * number
        for run in range(table.lows.shape[0]):
            low, more, kind = table.lows[run], table.spans[run], table.kinds[run]
            at, bins = SPAN_WORDS * (number * count + kind), (low, more, table.fold)
            if kind == before:
                for w in range(SPAN_WORDS):
                    tile.members[_U(at + w)] |= run_mask(codes, there + WORD * w, bins)
            else:
                for w in range(SPAN_WORDS):
                    tile.members[_U(at + w)] = run_mask(codes, there + WORD * w, bins)
            before = kind
        for kind in range(count):
            at = SPAN_WORDS * (number * count + kind)
            if left < SPAN:
                last = at + left // WORD
                tile.members[_U(last)] &= (_U(1) << _U(left % WORD)) - _U(1)
                for w in range(last + 1, at + SPAN_WORDS):
                    tile.members[_U(w)] = _U(0)
            found = np.int64(0)
            for w in range(at, at + SPAN_WORDS):
                tile.before[_U(w)] = found
                found += popcount(tile.members[_U(w)])
            tile.starts[kind, number + 1] = tile.starts[kind, number] + found
    return spans


def rule_of(grid: TileGrid, old: Bits) -> tuple[Any, Any]:
    """Return shift and mask of a bin in the dtype of the bits."""
    kind = old.dtype.type
    return kind(grid.shift), kind(grid.mask)


@compiled
def class_table(table: Any) -> Any:
    """Return the classes of the ``(512,)`` rates and sizes of a tensor."""
    by_bin, sizes = np.full(BINS, NEVER, np.uint8), table[BINS:]
    rates, common = np.zeros(MAX_RATE + 1, np.uint8), np.zeros(MAX_RATE + 1, np.uint8)
    mixed = np.zeros(MAX_RATE + 1, np.bool_)
    count = 0
    for rate in range(MAX_RATE + 1):
        found = False
        for bin_ in range(BINS):
            if table[bin_] != rate:
                continue
            if not found:
                rates[count], common[count], found = rate, sizes[bin_], True
            mixed[count] |= sizes[bin_] != common[count]
            by_bin[bin_] = count
        count += found
    half = BINS // 2
    fold = half - 1 if (by_bin[:half] == by_bin[half:]).all() else BINS - 1
    lows, spans = np.zeros(BINS, np.uint8), np.zeros(BINS, np.uint8)
    kinds = np.zeros(BINS, np.int64)
    runs = 0
    for kind in range(count):
        for bin_ in range(fold + 1):
            if by_bin[bin_] != kind:
                continue
            if bin_ > 0 and by_bin[bin_ - 1] == kind:
                spans[runs - 1] += 1
            else:
                lows[runs], kinds[runs] = bin_, kind
                runs += 1
    return ClassTable(
        rates[:count],
        sizes,
        lows[:runs],
        spans[:runs],
        np.uint8(fold),
        kinds[:runs],
        by_bin,
        common[:count],
        mixed[:count],
    )


class SegmentScratch(NamedTuple):
    """Memory of one thread for the work on a segment: fresh pages cost more than the work."""

    spans: int
    marks: npt.NDArray[np.uint64]
    counts: npt.NDArray[np.uint32]
    positions: npt.NDArray[np.int64]
    steps: npt.NDArray[np.uint64]
    codes: Bytes
    listed: npt.NDArray[np.int32]
    sized: Bytes
    tile: TileClasses


def thread_scratch(length: int) -> SegmentScratch:
    """Return this thread's memory for segments of some length."""
    spans = -(-max(length, 1) // SPAN)
    held: SegmentScratch | None = getattr(_local, "held", None)
    if held is None or held.spans < spans:
        held = _scratch(spans)
        _local.held = held
    return held


def _scratch(spans: int) -> SegmentScratch:
    """Take memory for a segment of some spans.

    It is one piece, of large pages, in which every array begins with a line of the caches: kernels
    took half as long again with arrays of their own.
    """
    words, classes = SPAN_WORDS * spans, MAX_RATE + 1
    rooms: dict[str, tuple[int, npt.DTypeLike]] = {
        "marks": (words, np.uint64),
        "counts": (words, np.uint32),
        "codes": (SPAN * spans + MAX_CUTS * TILE_GAP, np.uint8),
        "before": (classes * words, np.uint16),
        "members": (classes * words, np.uint64),
        "listed": (SPAN * spans + WORD, np.int32),
        "sized": (SPAN * spans, np.uint8),
        "positions": (SPAN * spans, np.int64),
        "steps": (SPAN * spans, np.uint64),
    }
    needed = [count * np.dtype(kind).itemsize for count, kind in rooms.values()]
    sizes = [nbytes + -nbytes % _LINE for nbytes in needed]
    piece = np.empty(sum(sizes) + _LINE, np.uint8)
    at = -piece.ctypes.data % _LINE
    found: dict[str, Any] = {}
    for size, (name, (count, kind)) in zip(sizes, rooms.items(), strict=True):
        nbytes = count * np.dtype(kind).itemsize
        found[name] = piece[at : at + nbytes].view(kind)
        at += size
    found["marks"][:] = 0
    starts = np.zeros((classes, spans + 1), np.int64)
    tile = TileClasses(found.pop("members"), found.pop("before"), starts)
    return SegmentScratch(spans=spans, tile=tile, **found)
