"""Compiled kernel that decodes tiles; see :mod:`.tiles` for the reference.

A rank is taken to a position by a walk over the words of its class. Steps are stored at their
places in the segment, and marked there; a walk over the marks then gives them in order.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deltachain import slab
from deltachain.kernels.compiling import compiled, inlined
from deltachain.kernels.tile_classes import (
    bin_segment,
    class_table,
    classify,
    rule_of,
    thread_scratch,
)
from deltachain.kernels.tiles import ENDS, ESCAPE, MAGNITUDES, NEVER, RANKS, Bytes, TileGrid
from deltachain.kernels.words import WORD, lowest, popcount
from deltachain.types import Bits, Indices

_U = np.uint64
_PAIRS, _FOURS = _U(0x5555555555555555), _U(0x3333333333333333)
_BYTES, _LOW, _HIGH = _U(0x0F0F0F0F0F0F0F0F), _U(0x0101010101010101), _U(0x8080808080808080)
_PLACES: Final = np.array(
    [[[n for n in range(8) if b >> n & 1][r : r + 1] or [0] for r in range(8)] for b in range(256)],
    np.uint8,
).reshape(256, 8)
"""Number of the one bit of each rank in each byte."""
_ALL: Final = _U(0xFFFFFFFFFFFFFFFF)
_PEEKED: Final = 40
"""Most one bits after which a word has room for a rank's low bits and a sign."""


@inlined
def _select(word: Any, rank: Any) -> Any:  # noqa: ANN401
    """Return the number of the one bit of a rank in a word that has it, without a branch."""
    sums = word - ((word >> _U(1)) & _PAIRS)
    sums = (sums & _FOURS) + ((sums >> _U(2)) & _FOURS)
    sums = ((sums + (sums >> _U(4))) & _BYTES) * _LOW  # one bits up to the end of each byte
    full = (((_U(rank) * _LOW) | _HIGH) - sums) & _HIGH
    place = _U(8 * popcount(full))
    before = ((sums << _U(8)) >> place) & _U(255)
    return np.int64(place) + np.int64(_PLACES[(word >> place) & _U(255), _U(rank) - before])


@inlined
def _peek(words: Any, at: Any) -> Any:  # noqa: ANN401
    """Return 64 bits from bit ``at`` on."""
    number, shift = at >> 6, _U(at & 63)
    after = words[_U(number + 1)] << _U(1)
    return (words[_U(number)] >> shift) | (after << (_U(63) - shift))


@compiled
def _run(words: Any, at: Any, most: Any, end: Any) -> Any:  # noqa: ANN401
    """Count one bits from bit ``at`` on, up to ``most``, not far beyond ``end``."""
    count = np.int64(0)
    while count < most and at + count < end:
        ones = lowest(~_peek(words, at + count))
        count += ones
        if ones < WORD:
            break
    return min(count, most)


@inlined
def _next_rank(words: Any, at: Any, end: Any, place: Any, rate: Any) -> Any:  # noqa: ANN401
    """Read a rank and a sign; return them, and the bit behind. The rank is -1 behind the last."""
    rank, total = place
    last = (total - 1 - rank) >> rate
    x = _peek(words, at)
    quotient = lowest(~x)
    if quotient > _PEEKED:
        quotient = _run(words, at, last + 1, end)
        x = _peek(words, at + quotient) >> _U(1)
    else:
        x >>= _U(quotient + 1)
    if quotient > last:
        return np.int64(-1), _U(0), at + last + 1
    rank += (quotient << rate) + np.int64(x & ((_U(1) << _U(rate)) - _U(1)))
    return rank, (x >> _U(rate)) & _U(1), at + quotient + 2 + rate


@inlined
def _next_step(words: Any, at: Any, negative: Any, size: Any, width: Any) -> Any:  # noqa: ANN401
    """Read a magnitude; return the step, or 0 if it is not canonical, and the bit behind."""
    excess = _U(0)
    if size != NEVER:
        x = _peek(words, at)
        quotient = min(lowest(~x), np.int64(ESCAPE))
        if quotient < ESCAPE:
            low = (x >> _U(quotient + 1)) & ((_U(1) << _U(size)) - _U(1))
            excess, at = (_U(quotient) << _U(size)) + low, at + quotient + 1 + size
        else:
            at += ESCAPE
            excess = _peek(words, at) & (_ALL >> _U(WORD - width))
            at += width
            if excess >> _U(size) < _U(ESCAPE):
                return _U(0), at
    if excess >= (_U(1) << _U(width - 1)) - _U(1) + negative:
        return _U(0), at
    return ((excess + _U(1)) ^ (_U(0) - negative)) + negative, at


@compiled
def _decode_class(words: Any, span: Any, codes: Any, kind: Any, box: Any, out: Any) -> Any:  # noqa: ANN401
    """Decode the changes of one class of a tile; return their number, and the bit behind them.

    The number is -1 to -3 if a rule is broken.
    """
    members, total, rate, sizes = kind
    width, columns, shift = box
    marks, steps = out
    at, end = span
    element = np.int64(8 * steps.itemsize)
    found, rank, base, w = 0, np.int64(0), np.int64(0), np.int64(0)
    while rank < total:
        rank, negative, at = _next_rank(words, at, end, (rank, total), rate)
        if rank < 0:
            break
        if rank >= total or at > end:
            return -1, at
        here = popcount(members[_U(w)])
        while base + here <= rank:
            base += here
            w += 1
            here = popcount(members[_U(w)])
        position = WORD * w + _select(members[_U(w)], rank - base)
        rank += 1
        size = np.int64(sizes[codes[_U(position)]])
        step, at = _next_step(words, at, negative, size, element)
        if step == _U(0) or at > end:
            return -2, at
        if columns:
            row = np.int64(np.uint32(position) // np.uint32(width))
            position += row * (columns - width) + shift
        steps[_U(position)] = steps.dtype.type(step)
        marks[_U(position >> 6)] |= _U(1) << _U(position & 63)
        found += 1
    return found, at


@compiled
def _decode_tile(words: Any, span: Any, codes: Any, classes: Any, box: Any, out: Any) -> Any:  # noqa: ANN401
    """Decode one tile to steps and marks of its segment; return their number, or -1 to -3."""
    tile, table = classes
    at, end = 8 * span[0], 8 * span[1]
    found = 0
    for c in range(table.rates.shape[0]):
        kind = tile.members[c], tile.totals[c], np.int64(table.rates[c]), table.sizes
        held, at = _decode_class(words, (at, end), codes, kind, box, out)
        if held < 0:
            return held
        found += held
    left = end - at
    if left < 0 or left > 7 or (_peek(words, at) & ((_U(1) << _U(left)) - _U(1))) != _U(0):
        return -3
    return found


@compiled
def _take(marks: Any, steps: Any, start: Any, length: Any, out: Any, count: Any) -> Any:  # noqa: ANN401
    """Move the marked steps of a segment to the end of ``out``, in order; clear the marks."""
    indices, values = out
    for w in range((length + 63) >> 6):
        word = marks[w]
        if word == _U(0):
            continue
        marks[w] = _U(0)
        while word != _U(0):
            offset = 64 * w + lowest(word)
            indices[count] = start + offset
            values[count] = steps[offset]
            count += 1
            word &= word - _U(1)
    return count


@compiled
def _sizes(data: Any, at: Any, end: Any, ends: Any) -> Any:  # noqa: ANN401
    """Read the sizes of a segment's tiles into their ends; return the first byte, or -3."""
    count = ends.shape[0]
    for t in range(count - 1):
        value, shift = np.int64(0), np.int64(0)
        while True:
            if at >= end or shift > 21:
                return np.int64(-3)
            byte = np.int64(data[at])
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        if byte == 0 and shift > 7:
            return np.int64(-3)
        ends[t] = value
    total = at
    for t in range(count - 1):
        total += ends[t]
        ends[t] = total
    if total > end:
        return np.int64(-3)
    ends[count - 1] = end
    return at


@compiled
def _decode(
    segments: Any,  # noqa: ANN401
    coded: Any,  # noqa: ANN401
    old: Any,  # noqa: ANN401
    grid: Any,  # noqa: ANN401
    scratch: Any,  # noqa: ANN401
    out: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Decode all segments; return the number of elements, or -1 to -3."""
    columns, cuts, first, rule, table, wanted = grid
    marks, steps, codes, tile = scratch
    data, packed = coded
    ends = np.empty(cuts, np.int64)
    at, count = np.int64(0), np.int64(0)
    for s in range(segments.shape[0]):
        start, length, nnz, nbytes = segments[s, 0], segments[s, 1], segments[s, 2], segments[s, 3]
        end = at + nbytes
        begin = _sizes(data, at, end, ends)
        if begin < 0:
            return -3
        found, skipped = np.int64(0), False
        width, rows, stride = length, np.int64(1), np.int64(0)
        if cuts > 1:
            width, rows, stride = columns // cuts, length // columns, columns
        bin_segment(old[start - first :], (rows, width * cuts), cuts, rule, codes)
        for t in range(cuts):
            span, begin = (begin, ends[t]), ends[t]
            if wanted.shape[0] and not wanted[s, t]:
                skipped = True
                continue
            mine = codes[t * rows * width :]
            classify(mine, rows * width, table, tile)
            box = width, stride, t * width
            held = _decode_tile(packed, span, mine, (tile, table), box, (marks, steps))
            if held < 0:
                return held
            found += held
        if found > nnz or (not skipped and found != nnz):
            return -1
        count = _take(marks, steps, start, length, out, count)
        at = end
    return count


def decode_tiles(
    segments: npt.NDArray[np.int64],
    data: Bytes,
    old: Bits,
    table: Bytes,
    grid: TileGrid,
    wanted: npt.NDArray[np.bool_] | None = None,
) -> tuple[Indices, Bits]:
    """Decode the tiles of some segments of one tensor; see the reference."""
    nnz = int(segments[:, 2].sum())
    indices, values = slab.empty(nnz, np.int64), slab.empty(nnz, old.dtype)
    chosen = np.empty((0, 0), np.bool_) if wanted is None else wanted
    classes = class_table(table)
    held = thread_scratch(int(segments[:, 1].max(initial=0)))
    scratch = held.marks, held.steps.view(old.dtype), held.codes, held.tile(len(classes.rates))
    packed = np.zeros(data.size // 8 + 4, np.uint64)  # whole words, and a few to look ahead
    packed.view(np.uint8)[: data.size] = data
    how = grid.columns, grid.cuts, grid.start, rule_of(grid, old), classes, chosen
    out = indices, values
    count = _decode(segments, (data, packed), old, how, scratch, out)
    if count < 0:
        held.marks[:] = 0
        raise ValueError((RANKS, MAGNITUDES, ENDS)[-count - 1])
    return indices[:count], values[:count]
