"""Compiled kernel that decodes tiles; see :mod:`.tiles` for the reference.

A rank is taken to a position by the numbers of elements of its class before spans, blocks and words
of the tile. The places of a segment are marked, and what is marked before each gives the order.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deltachain import slab
from deltachain.kernels.compiling import compiled, inlined
from deltachain.kernels.tile_classes import (
    BLOCK,
    SPAN,
    SPAN_BLOCKS,
    SPAN_WORDS,
    bin_segment,
    class_table,
    classify,
    rule_of,
    thread_scratch,
)
from deltachain.kernels.tiles import ENDS, ESCAPE, MAGNITUDES, NEVER, RANKS, Bytes, TileGrid
from deltachain.kernels.words import WORD, full_of_blocks, full_of_eight, lowest, popcount
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
_LISTED: Final = 2
"""Largest rate of classes whose positions are listed: many of their elements changed."""
_INVERSE_BITS: Final = 40
"""Bits of the inverse of a width, which gives the row of each of ``2**20`` elements exactly."""


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


@compiled
def _far_excess(words: Any, at: Any, size: Any, width: Any) -> Any:  # noqa: ANN401
    """Read a magnitude less 1; return it, or one too large if not canonical, and the bit behind."""
    x = _peek(words, at)
    quotient = min(lowest(~x), np.int64(ESCAPE))
    if quotient < ESCAPE:
        low = (x >> _U(quotient + 1)) & ((_U(1) << _U(size)) - _U(1))
        return (_U(quotient) << _U(size)) + low, at + quotient + 1 + size
    at += ESCAPE
    excess = _peek(words, at) & (_ALL >> _U(WORD - width))
    if excess >> _U(size) < _U(ESCAPE):
        excess = _ALL
    return excess, at + width


@inlined
def _place(tile: Any, count: Any, kind: Any, span: Any, rank: Any) -> Any:  # noqa: ANN401
    """Return the position of an element in a tile, by its rank in its class and span."""
    at = span * count + kind
    block = full_of_blocks(tile.before, SPAN_BLOCKS * at, rank)
    rank -= np.int64(tile.before[_U(SPAN_BLOCKS * at + block)])
    words = SPAN_WORDS * at + 8 * block
    word, passed = full_of_eight(tile.members, words, rank)
    there = _select(tile.members[_U(words + word)], rank - passed)
    return SPAN * span + BLOCK * block + WORD * word + there


@compiled
def _list(tile: Any, kind: Any, spans: Any, out: Any) -> None:  # noqa: ANN401
    """Write the position of each element of a class of a tile, in order."""
    rank = 0
    for span in range(spans):
        at = SPAN_WORDS * (span * tile.starts.shape[0] + kind)
        for w in range(SPAN_WORDS):
            word = tile.members[_U(at + w)]
            out[_U(rank)] = SPAN * span + WORD * w + lowest(word)  # if there is none, the next is
            rank += word != _U(0)
            word &= word - _U(1)
            while word != _U(0):
                out[_U(rank)] = SPAN * span + WORD * w + lowest(word)
                rank += 1
                word &= word - _U(1)


@compiled
def _decode_class(words: Any, span: Any, codes: Any, classes: Any, box: Any, out: Any) -> Any:  # noqa: ANN401
    """Append places and steps of one class of a tile; return their number, and the bit behind them.

    The number is -1 to -3 if a rule is broken.
    """
    tile, table, spans, kind = classes
    positions, steps, found, by_rank = out
    bins, first = codes
    at, end = span
    starts, count = tile.starts[kind], tile.starts.shape[0]
    total, rate = starts[spans], np.int64(table.rates[kind])
    size, mixed = np.int64(table.common[kind]), table.mixed[kind]
    width, stride, shift, inverse = box
    listed = rate <= _LISTED
    if listed:
        _list(tile, kind, spans, by_rank)
    element = np.int64(8 * steps.itemsize)
    most = (_U(1) << _U(element - 1)) - _U(1)
    rank, number = np.int64(0), np.int64(0)
    while rank < total:
        last = (total - 1 - rank) >> rate
        x = _peek(words, at)
        quotient = lowest(~x)
        used = quotient + 2 + rate
        if quotient > _PEEKED:
            quotient = _run(words, at, last + 1, end)
            x, used = _peek(words, at + quotient) >> _U(1), quotient + 2 + rate
        else:
            x >>= _U(quotient + 1)
        if quotient > last:
            at += last + 1
            break
        rank += (quotient << rate) + np.int64(x & ((_U(1) << _U(rate)) - _U(1)))
        if rank >= total or at + used > end:
            return np.int64(-1), at
        if listed:
            position = np.int64(by_rank[_U(rank)])
        else:
            while starts[_U(number + 1)] <= rank:
                number += 1
            position = _place(tile, count, kind, number, rank - starts[_U(number)])
        rank += 1
        if mixed:
            size = np.int64(table.sizes[bins[_U(first + position)]])
        if stride:
            row = np.int64((_U(position) * inverse) >> _U(_INVERSE_BITS))
            position += row * (stride - width) + shift
        negative, excess = (x >> _U(rate)) & _U(1), _U(0)
        if size != NEVER:  # a magnitude, mostly in the bits that are at hand
            x >>= _U(rate + 1)
            quotient = lowest(~x)
            if quotient < ESCAPE and used + quotient + 1 + size <= WORD:
                excess = (x >> _U(quotient + 1)) & ((_U(1) << _U(size)) - _U(1))
                excess += _U(quotient) << _U(size)
                at += used + quotient + 1 + size
            else:
                excess, at = _far_excess(words, at + used, size, element)
        else:
            at += used
        if excess >= most + negative or at > end:
            return np.int64(-2), at
        positions[_U(found)] = position
        steps[_U(found)] = steps.dtype.type(((excess + _U(1)) ^ (_U(0) - negative)) + negative)
        found += 1
    return found, at


@compiled
def _decode_tile(words: Any, span: Any, codes: Any, classes: Any, box: Any, out: Any) -> Any:  # noqa: ANN401
    """Append places and steps of one tile; return their number so far, or -1 to -3."""
    at, end = 8 * span[0], 8 * span[1]
    tile, table, spans = classes
    positions, steps, found, by_rank = out
    for kind in range(table.rates.shape[0]):
        into, mine = (positions, steps, found, by_rank), (tile, table, spans, kind)
        found, at = _decode_class(words, (at, end), codes, mine, box, into)
        if found < 0:
            return found
    left = end - at
    if left < 0 or left > 7 or (_peek(words, at) & ((_U(1) << _U(left)) - _U(1))) != _U(0):
        return np.int64(-3)
    return found


@compiled
def _sort(positions: Any, steps: Any, start: Any, scratch: Any, out: Any) -> None:  # noqa: ANN401
    """Write the places and steps of a segment by ascending place."""
    marks, counts = scratch
    indices, values = out
    for i in range(positions.shape[0]):
        position = _U(positions[i])
        marks[position >> _U(6)] |= _U(1) << (position & _U(63))
    count = np.int64(0)
    for w in range(marks.shape[0]):
        counts[w] = count
        word = marks[w]
        indices[_U(count)] = start + 64 * w + lowest(word)  # if there is none, the next is
        count += word != _U(0)
        word &= word - _U(1)
        while word != _U(0):
            indices[_U(count)] = start + 64 * w + lowest(word)
            count += 1
            word &= word - _U(1)
    for i in range(positions.shape[0]):
        position = _U(positions[i])
        before = marks[position >> _U(6)] & ((_U(1) << (position & _U(63))) - _U(1))
        values[_U(counts[position >> _U(6)]) + _U(popcount(before))] = steps[i]
    marks[:] = _U(0)


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
    columns, cuts, zero, rule, table, wanted = grid
    marks, counts, positions, steps, codes, by_rank, tile = scratch
    data, packed = coded
    ends = np.empty(cuts, np.int64)
    at, count = np.int64(0), np.int64(0)
    for s in range(segments.shape[0]):
        start, length, nnz, nbytes = segments[s, 0], segments[s, 1], segments[s, 2], segments[s, 3]
        end = at + nbytes
        begin = _sizes(data, at, end, ends)
        if begin < 0:
            return np.int64(-3)
        found, skipped = np.int64(0), False
        width, rows, stride = length, np.int64(1), np.int64(0)
        if cuts > 1:
            width, rows, stride = columns // cuts, length // columns, columns
        inverse = _U((1 << _INVERSE_BITS) // width + 1)
        shape = rows, width * cuts
        apart = bin_segment(old[start - zero :], shape, cuts, rule, codes)
        for t in range(cuts):
            span, begin = (begin, ends[t]), ends[t]
            if wanted.shape[0] and not wanted[s, t]:
                skipped = True
                continue
            mine = codes, t * apart
            classes = tile, table, classify(codes, t * apart, rows * width, table, tile)
            box, into = (width, stride, t * width, inverse), (positions, steps, found, by_rank)
            found = _decode_tile(packed, span, mine, classes, box, into)
            if found < 0:
                return found
        if found > nnz or (not skipped and found != nnz):
            return np.int64(-1)
        here = slice(count, count + found)
        rest = out[0][count:], out[1][here]
        _sort(positions[:found], steps, start, (marks[: (length + 63) >> 6], counts), rest)
        count += found
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
    indices, values = slab.empty(nnz + 1, np.int64), slab.empty(nnz, old.dtype)
    chosen = np.empty((0, 0), np.bool_) if wanted is None else wanted
    classes = class_table(table)
    held = thread_scratch(int(segments[:, 1].max(initial=0)))
    steps, tile = held.steps.view(old.dtype), held.tile(len(classes.rates))
    scratch = held.marks, held.counts, held.positions, steps, held.codes, held.listed, tile
    packed = np.zeros(data.size // 8 + 4, np.uint64)  # whole words, and a few to look ahead
    packed.view(np.uint8)[: data.size] = data
    how = grid.columns, grid.cuts, grid.start, rule_of(grid, old), classes, chosen
    count = _decode(segments, (data, packed), old, how, scratch, (indices, values))
    if count < 0:
        raise ValueError((RANKS, MAGNITUDES, ENDS)[-count - 1])
    return indices[:count], values[:count]
