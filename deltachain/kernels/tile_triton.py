"""Triton programs that decode tiles of ``max`` (FORMAT.md 4): one instance works on one tile.

Bytes of tiles are untrusted: what is derived from them is compared with bounds of the tables before
it leads anywhere, and reading stops behind the end of a segment. Tables are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltachain.kernels.programs import extend
from deltachain.kernels.segments import Column
from deltachain.kernels.tile_batch import CLASS_NBYTES, TileColumn, TileReason
from deltachain.kernels.tiles import BINS, ESCAPE, NEVER

_SEGMENTS = tl.constexpr(len(Column))
_SEGMENT_FIRST = tl.constexpr(int(Column.FIRST))
_COLUMNS = tl.constexpr(len(TileColumn))
_SEGMENT = tl.constexpr(int(TileColumn.SEGMENT))
_TENSOR = tl.constexpr(int(TileColumn.TENSOR))
_AT = tl.constexpr(int(TileColumn.AT))
_START = tl.constexpr(int(TileColumn.START))
_ROWS = tl.constexpr(int(TileColumn.ROWS))
_WIDTH = tl.constexpr(int(TileColumn.WIDTH))
_STRIDE = tl.constexpr(int(TileColumn.STRIDE))
_SHIFT = tl.constexpr(int(TileColumn.SHIFT))
_MASK = tl.constexpr(int(TileColumn.MASK))
_CLASSES = tl.constexpr(int(TileColumn.CLASSES))
_COUNT = tl.constexpr(int(TileColumn.COUNT))
_FIRST = tl.constexpr(int(TileColumn.FIRST))
_NBYTES = tl.constexpr(int(TileColumn.NBYTES))
_NUMBER = tl.constexpr(int(TileColumn.NUMBER))
_CUTS = tl.constexpr(int(TileColumn.CUTS))
_BAD_RANKS = tl.constexpr(int(TileReason.RANKS))
_BAD_MAGNITUDES = tl.constexpr(int(TileReason.MAGNITUDES))
_BAD_ENDS = tl.constexpr(int(TileReason.ENDS))
_BINS = tl.constexpr(BINS)
_RATES = tl.constexpr(2 * BINS)
_NEVER = tl.constexpr(NEVER)
_ESCAPE = tl.constexpr(ESCAPE)
_SEEN = tl.constexpr(57)
_FIRST_UNSEEN = tl.constexpr(1 << 57)
MOST_CLASSES = CLASS_NBYTES - 2 * BINS
"""Places for the first element of each class of a tile, and behind the last."""
_BOUNDS = tl.constexpr(MOST_CLASSES)


@triton.jit
def list_tile(
    rows,
    classes,
    addresses,
    firsts,
    listed,
    bounds,
    values,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the elements of a tile class by class, in order, by their positions in the tile.

    ``firsts`` has the place of each tile in ``listed``; ``bounds`` gets the first of each class.
    """
    program = tl.program_id(0).to(tl.int64)
    row = rows + program * _COLUMNS
    old = tl.load(addresses + tl.load(row + _TENSOR)).to(values.dtype) + tl.load(row + _AT)
    width, stride = tl.load(row + _WIDTH).to(tl.int32), tl.load(row + _STRIDE)
    size = tl.load(row + _ROWS).to(tl.int32) * width
    shift, bins = tl.load(row + _SHIFT), tl.load(row + _MASK)
    kinds = classes + tl.load(row + _CLASSES)
    count = tl.load(row + _COUNT).to(tl.int32)
    out = listed + tl.load(firsts + program)
    found = size - size
    for kind in range(0, count):
        tl.store(bounds + program * _BOUNDS + kind, found)
        for begin in range(0, size, BLOCK):
            lane = begin + tl.arange(0, BLOCK)
            mask = lane < size
            across = lane // width
            place = across.to(tl.int64) * stride + (lane - across * width)
            bits = extend(tl.load(old + place, mask=mask, other=0), WIDTH)
            bin_ = (bits >> shift) & bins
            mine = mask & (tl.load(kinds + bin_, mask=mask, other=_NEVER).to(tl.int32) == kind)
            one = mine.to(tl.int32)
            tl.store(out + found + tl.cumsum(one, 0) - 1, lane, mask=mine)
            found += tl.sum(one, 0)
    tl.store(bounds + program * _BOUNDS + count, found)


@triton.jit
def _peek(words, at):
    """Return 64 bits from bit ``at`` on."""
    word, shift = words + (at >> 6), (at & 63).to(tl.uint64)
    low, high = tl.load(word), tl.load(word + 1)
    return (low >> shift) | ((high << 1) << (63 - shift))


@triton.jit
def _ones(bits):
    """Count the one bits from the lowest on, up to 57.

    The first zero bit is taken alone, and its number is the exponent of it as a float.
    """
    zeros = ~bits | _FIRST_UNSEEN
    first = (zeros & (0 - zeros)).to(tl.int64)
    return (first.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1023


@triton.jit
def _run(words, at, most, end):
    """Count one bits from bit ``at`` on, up to ``most``, not far beyond ``end``."""
    count = _ones(_peek(words, at))
    more = count
    while (more == _SEEN) & (count < most) & (at + count < end):
        more = _ones(_peek(words, at + count))
        count += more
    return tl.minimum(count, most)


@triton.jit
def _varint(words, at, end):
    """Read seven bits a byte; return the value, the bit behind it and whether it is canonical."""
    value, shift = at - at, at - at
    byte = at - at + 128
    while (byte >= 128) & (shift <= 21) & (at < end):
        byte = (_peek(words, at) & 255).to(tl.int64)
        value |= (byte & 127) << shift
        shift += 7
        at += 8
    return value, at, (byte < 128) & ((byte != 0) | (shift <= 7))


@triton.jit
def _span(words, row):
    """Return the first bit of a tile and the one behind it, and whether sizes are canonical."""
    at = tl.load(row + _FIRST) * 8
    end = at + tl.load(row + _NBYTES) * 8
    number = tl.load(row + _NUMBER)
    cuts = tl.load(row + _CUTS)
    before, size, all_of = at - at, at - at, at - at
    good = at <= end
    for tile in range(0, cuts.to(tl.int32) - 1):
        value, at, fits = _varint(words, at, end)
        good = good & fits
        before += tl.where(tile < number, value, 0)
        size += tl.where(tile == number, value, 0)
        all_of += value
    good = good & (at + all_of * 8 <= end)
    begin = tl.where(good, at + before * 8, end)
    stop = tl.where(number == cuts - 1, end, begin + size * 8)
    return begin, tl.where(good, stop, end), good


@triton.jit
def _magnitude(words, at, size, WIDTH: tl.constexpr):
    """Return a magnitude less 1, the bit behind it and whether it is canonical."""
    bits = _peek(words, at)
    quotient = tl.minimum(_ones(bits), _ESCAPE)
    shift = size.to(tl.uint64)
    one = (bits & 0) + 1
    low = (bits >> (quotient + 1).to(tl.uint64)) & ((one << shift) - 1)
    excess = (quotient.to(tl.uint64) << shift) | low
    behind = at + quotient + 1 + size
    whole = _peek(words, at + _ESCAPE)
    if WIDTH < 8:
        whole &= (1 << (8 * WIDTH)) - 1
    far = quotient == _ESCAPE
    good = (quotient < _ESCAPE) | ((whole >> shift) >= _ESCAPE)
    return tl.where(far, whole, excess), tl.where(far, at + _ESCAPE + 8 * WIDTH, behind), good


@triton.jit
def read_tile(
    rows,
    table,
    classes,
    words,
    addresses,
    firsts,
    listed,
    bounds,
    indices,
    values,
    cursors,
    verdict,
    WIDTH: tl.constexpr,
):
    """Read the ranks and steps of a tile whose elements are listed; append what they give.

    Elements of a segment are in no order: tiles of one segment are read at the same time.
    """
    program = tl.program_id(0).to(tl.int64)
    row = rows + program * _COLUMNS
    segment = tl.load(row + _SEGMENT)
    old = tl.load(addresses + tl.load(row + _TENSOR)).to(values.dtype) + tl.load(row + _AT)
    start, width, stride = tl.load(row + _START), tl.load(row + _WIDTH), tl.load(row + _STRIDE)
    shift, bins = tl.load(row + _SHIFT), tl.load(row + _MASK)
    kinds = classes + tl.load(row + _CLASSES)
    first = tl.load(table + segment * _SEGMENTS + _SEGMENT_FIRST)
    room = tl.load(table + (segment + 1) * _SEGMENTS + _SEGMENT_FIRST) - first
    mine = listed + tl.load(firsts + program)
    at, end, good = _span(words, row)
    reason = tl.where(good, 0, _BAD_ENDS)
    rank, before, reached = at - at, at - at, at < 0  # a rank may lie behind its class
    for kind in range(0, tl.load(row + _COUNT).to(tl.int32)):
        begin = tl.load(bounds + program * _BOUNDS + kind)
        total = (tl.load(bounds + program * _BOUNDS + kind + 1) - begin).to(tl.int64)
        rate = tl.load(kinds + _RATES + kind).to(tl.int64)
        more = rate - before
        before = rate
        bits = _peek(words, at)
        low = (bits & ((((bits & 0) + 1) << more.to(tl.uint64)) - 1)).to(tl.int64)
        rank = (rank << more) | tl.where(reached, low, 0)
        at += tl.where(reached, more, 0)
        going = (rank < total) & (reason == 0)
        while going:
            last = (total - 1 - rank) >> rate
            quotient = tl.where(reached, 0, _run(words, at, last + 1, end))
            passes = quotient > last  # no more elements of the class
            more_bits = tl.where(reached | passes, 0, rate)
            at += tl.where(reached, 0, tl.where(passes, quotient, quotient + 1))
            bits = _peek(words, at)
            low = (bits & ((((bits & 0) + 1) << more_bits.to(tl.uint64)) - 1)).to(tl.int64)
            rank += (quotient << rate) + low
            at += more_bits
            reached = passes == 0
            if reached & (rank < total):
                place = tl.load(mine + begin + rank).to(tl.int64)
                across = place // width
                place += across * (stride - width)
                previous = extend(tl.load(old + place), WIDTH)
                size = tl.load(kinds + _BINS + ((previous >> shift) & bins)).to(tl.int64)
                bits = _peek(words, at)
                negative = bits & 1
                at += 1
                excess, behind, fits = _magnitude(words, at, tl.minimum(size, 31), WIDTH)
                single = size == _NEVER
                excess = tl.where(single, 0, excess)
                at = tl.where(single, at, behind)
                most = (((bits & 0) + 1) << (8 * WIDTH - 1)) - 1
                fits = (single | fits) & (excess < most + negative)
                reason = tl.where(fits, reason, _BAD_MAGNITUDES)
                step = tl.where(negative != 0, (0 - excess) - 1, excess + 1)
                fits = (reason == 0) & (at <= end)
                slot = tl.atomic_add(cursors + segment, 1, mask=fits, sem="relaxed").to(tl.int64)
                fits = fits & (slot < room)
                tl.store(indices + first + slot, start + place, mask=fits)
                tl.store(values + first + slot, step.to(values.dtype.element_ty), mask=fits)
                rank += 1
                reached = at < 0
            reason = tl.where((reason == 0) & (at > end), _BAD_ENDS, reason)
            going = (rank < total) & (reason == 0)
        rank -= total
    reason = tl.where((reason == 0) & reached, _BAD_RANKS, reason)
    left = end - at
    rest = _peek(words, at)
    rest &= (((rest & 0) + 1) << tl.minimum(tl.maximum(left, 0), 7).to(tl.uint64)) - 1
    ended = (left >= 0) & (left < 8) & (rest == 0)
    reason = tl.where((reason == 0) & (ended == 0), _BAD_ENDS, reason)
    tl.atomic_max(verdict + segment, reason, sem="relaxed")
