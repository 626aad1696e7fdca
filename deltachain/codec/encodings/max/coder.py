"""Compiled kernels that encode and decode tiles; see :mod:`.tiles`.

To decode, the ranks of a class are read first, then taken to positions by the numbers of its
elements before spans and words of the tile: neither waits for the other. Where the size of a
magnitude depends on the element, the class is listed before. Elements are found tile by tile and
class by class. To put a segment in order, its places are marked, and what is marked before each
gives its number.
"""

from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deltachain import threads as slab
from deltachain.codec.encodings.max import tiles
from deltachain.codec.encodings.max.classes import (
    SPAN,
    SPAN_WORDS,
    WORD,
    SegmentScratch,
    bin_segment,
    class_table,
    classify,
    load_word,
    lowest,
    popcount,
    rule_of,
    select,
    thread_scratch,
)
from deltachain.codec.encodings.max.tiles import ENDS, ESCAPE, MAGNITUDES, NEVER, RANKS, TileStreams
from deltachain.kernels.arrays import StagedSteps, WindowPlace
from deltachain.kernels.compiling import compiled, inlined
from deltachain.kernels.numba_kernels import locate, move, run_stage
from deltachain.types import Bits, Indices

_U = np.uint64

# Eight bytes hold what an element usually takes; longer ones are read again, from their own bits
# on.

_ALL: Final = _U(0xFFFFFFFFFFFFFFFF)
_AT_HAND: Final = WORD - 7  # bits of the eight bytes around a bit, from that on, at least
MARGIN: Final = 32  # bytes that are read behind the last tile, at most; they must be zero


@inlined
def peek(data: Any, at: Any) -> Any:
    """Return 64 bits from bit ``at`` on."""
    byte, shift = at >> 3, _U(at & 7)
    behind = _U(data[_U(byte + 8)]) << _U(1)
    return (load_word(data, byte) >> shift) | (behind << (_U(63) - shift))


@compiled
def _run(data: Any, at: Any, most: Any, end: Any) -> Any:
    """Count one bits from bit ``at`` on, up to ``most``, not far beyond ``end``."""
    count = np.int64(0)
    while count < most and at + count < end:
        ones = lowest(~peek(data, at + count))
        count += ones
        if ones < WORD:
            break
    return min(count, most)


@compiled
def _far_excess(data: Any, at: Any, size: Any, width: Any) -> Any:
    """Read a magnitude less 1; return it, or one too large if not canonical, and the bit behind."""
    x = peek(data, at)
    quotient = min(lowest(~x), np.int64(ESCAPE))
    if quotient < ESCAPE:
        low = (x >> _U(quotient + 1)) & ((_U(1) << _U(size)) - _U(1))
        return (_U(quotient) << _U(size)) + low, at + quotient + 1 + size
    at += ESCAPE
    excess = peek(data, at) & (_ALL >> _U(WORD - width))
    if excess >> _U(size) < _U(ESCAPE):
        excess = _ALL
    return excess, at + width


@inlined
def _excess(data: Any, x: Any, bits: Any, size: Any, width: Any) -> Any:
    """Read a magnitude less 1, mostly from the bits at hand; see ``_far_excess``."""
    at, used = bits
    x >>= _U(1)
    quotient = lowest(~x)
    after = used + quotient + 1 + size
    if quotient < ESCAPE and after <= _AT_HAND:
        low = (x >> _U(quotient + 1)) & ((_U(1) << _U(size)) - _U(1))
        return (_U(quotient) << _U(size)) + low, at + after
    return _far_excess(data, at + used, size, width)


@inlined
def enter_class(data: Any, at: Any, begin: Any, more: Any) -> Any:
    """Return the rank in a class of one behind the class before it, and the bit behind it.

    ``begin`` is that rank, and whether its element changed: then its low bits follow. ``more`` is
    the difference of the rates.
    """
    rank, reached = begin
    rank <<= more
    if reached:
        rank |= np.int64(peek(data, at) & ((_U(1) << _U(more)) - _U(1)))
        at += more
    return rank, at


@compiled
def read_ranks(data: Any, span: Any, kind: Any, members: Any, out: Any) -> Any:
    """Append ranks and steps of a class.

    Returns their number, or -1 or -2 if a rule is broken; the bit behind them; the rank reached,
    less the elements of the class; and whether that element changed.
    """
    rate, size, mixed, sized = kind
    ranks, steps, found = out
    at, end = span
    total, (rank, reached) = members
    width = np.int64(8 * steps.itemsize)
    most = (_U(1) << _U(width - 1)) - _U(1)
    low = (_U(1) << _U(rate)) - _U(1)
    while rank < total:
        if reached:
            x, used = peek(data, at), np.int64(1)
            reached = False
        else:
            x = load_word(data, at >> 3) >> _U(at & 7)
            quotient = lowest(~x)
            used = quotient + 2 + rate
            if used > _AT_HAND:
                quotient = _run(data, at, ((total - 1 - rank) >> rate) + 1, end)
                x, used = peek(data, at + quotient) >> _U(1), quotient + 2 + rate
            else:
                x >>= _U(quotient + 1)
            gap = (quotient << rate) + np.int64(x & low)
            if gap >= total - rank:
                passed = ((total - 1 - rank) >> rate) + 1
                if quotient < passed:
                    return found, at + quotient + 1 + rate, rank + gap - total, True
                return found, at + passed, rank + (passed << rate) - total, False
            rank += gap
            x >>= _U(rate)
        if mixed:
            size = np.int64(sized[_U(rank)])
        ranks[_U(found)] = rank
        rank += 1
        negative, excess = x & _U(1), _U(0)
        if size == NEVER:
            at += used
        else:
            excess, at = _excess(data, x, (at, used), size, width)
        if excess >= most + negative or at > end:
            return np.int64(-2), at, rank, False
        steps[_U(found)] = steps.dtype.type(((excess + _U(1)) ^ (_U(0) - negative)) + negative)
        found += 1
    return found, at, rank - total, reached


_INVERSE_BITS: Final = 40
"""Bits of the inverse of a width, which gives the row of each of ``2**20`` elements exactly."""
_FEW: Final = 3  # one bits of a word that are written without a branch
BROKEN: Final = (RANKS, MAGNITUDES, ENDS)
"""What is wrong with tiles for which a kernel returns -1, -2 or -3."""


@inlined
def _place(tile: Any, at: Any, rank: Any) -> Any:
    """Return the position of an element in a span, by its rank in its class and the span.

    ``at`` is the first word of the class and the span.
    """
    word = np.int64(0)
    for step in (32, 16, 8, 4, 2, 1):
        word += step * (tile.before[_U(at + word + step)] <= rank)
    passed = np.int64(tile.before[_U(at + word)])
    return WORD * word + select(tile.members[_U(at + word)], rank - passed)


@compiled
def _place_class(tile: Any, which: Any, spans: Any, box: Any, positions: Any, some: Any) -> None:
    """Replace some ranks in a class by flat indices.

    ``which`` is the number of classes and that of the class; ``some`` is the first rank and the one
    behind the last.
    """
    starts, (count, kind) = tile.starts, which
    i, stop = some
    for number in range(spans):
        before, behind = starts[kind, number], starts[kind, number + 1]
        words, first = SPAN_WORDS * (number * count + kind), SPAN * number
        while i < stop and positions[_U(i)] < behind:
            position = first + _place(tile, words, positions[_U(i)] - before)
            positions[_U(i)] = _flat(position, box)
            i += 1


@compiled
def _list_class(tile: Any, which: Any, spans: Any, listed: Any) -> None:
    """Write the position of each element of a class in the tile, in order."""
    (count, kind), at = which, np.int64(0)
    for number in range(spans):
        words = SPAN_WORDS * (number * count + kind)
        for w in range(SPAN_WORDS):
            at += _write_ones(tile.members[_U(words + w)], SPAN * number + WORD * w, listed, at)


@compiled
def _list_sizes(bins: Any, first: Any, sizes: Any, listed: Any, total: Any, sized: Any) -> None:
    """Write the size of the bin of each element that is listed."""
    for i in range(total):
        sized[_U(i)] = sizes[bins[_U(first + np.int64(listed[_U(i)]))]]


@compiled
def _place_listed(listed: Any, box: Any, positions: Any, some: Any) -> None:
    """Replace some ranks in a class that is listed by flat indices."""
    for i in range(some[0], some[1]):
        positions[_U(i)] = _flat(np.int64(listed[_U(positions[_U(i)])]), box)


@inlined
def _flat(position: Any, box: Any) -> Any:
    """Return the flat index of a position in a tile.

    ``box`` is the width of the tile; the elements of a row of the tensor, or 0 if the tile is one
    row; the flat index of its first element; and the inverse of the width.
    """
    width, stride, first, inverse = box
    if stride:
        row = np.int64((_U(position) * inverse) >> _U(_INVERSE_BITS))
        position += row * (stride - width)
    return first + position


@inlined
def _write_ones(word: Any, first: Any, out: Any, at: Any) -> Any:
    """Write the numbers of the one bits of a word, from ``first`` on; return how many there are.

    A few are always written, at worst those that are not there: mostly no branch is guessed wrong.
    """
    ones = popcount(word)
    for n in range(_FEW):
        out[_U(at + n)] = first + lowest(word)
        word &= word - _U(1)
    if word != _U(0):
        for n in range(_FEW, ones):
            out[_U(at + n)] = first + lowest(word)
            word &= word - _U(1)
    return ones


@compiled
def _decode_tile(data: Any, span: Any, codes: Any, classes: Any, box: Any, out: Any) -> Any:
    """Append indices and steps of one tile; return their number so far, or -1 to -3."""
    at, end = 8 * span[0], 8 * span[1]
    tile, table, spans = classes
    positions, steps, found, listed, sized = out
    count = table.rates.shape[0]
    rank, reached, last = np.int64(0), False, np.int64(0)
    for kind in range(count):
        into, before = (positions, steps, found), found
        rate, total = np.int64(table.rates[kind]), tile.starts[kind, spans]
        rank, at = enter_class(data, at, (rank, reached), rate - last)
        last = rate
        if table.mixed[kind]:
            _list_class(tile, (count, kind), spans, listed)
            _list_sizes(codes[0], codes[1], table.sizes, listed, total, sized)
        how = rate, np.int64(table.common[kind]), table.mixed[kind], sized
        span, begin = (at, end), (rank, reached)
        found, at, rank, reached = read_ranks(data, span, how, (total, begin), into)
        if found < 0:
            return found
        if table.mixed[kind]:
            _place_listed(listed, box, positions, (before, found))
        else:
            _place_class(tile, (count, kind), spans, box, positions, (before, found))
    if reached:
        return np.int64(-1)
    left = end - at
    if left < 0 or left > 7 or (peek(data, at) & ((_U(1) << _U(left)) - _U(1))) != _U(0):
        return np.int64(-3)
    return found


@compiled
def _sort(positions: Any, steps: Any, start: Any, scratch: Any, out: Any) -> None:
    """Write the indices and steps of a segment, whose first index is ``start``, in order."""
    marks, counts = scratch
    indices, values = out
    for i in range(positions.shape[0]):
        position = _U(positions[i] - start)
        marks[position >> _U(6)] |= _U(1) << (position & _U(63))
    count = np.int64(0)
    for w in range(marks.shape[0]):
        counts[w] = count
        count += _write_ones(marks[w], start + WORD * w, indices, count)
    for i in range(positions.shape[0]):
        position = _U(positions[i] - start)
        before = marks[position >> _U(6)] & ((_U(1) << (position & _U(63))) - _U(1))
        values[_U(counts[position >> _U(6)]) + _U(popcount(before))] = steps[i]
    marks[:] = _U(0)


@compiled
def _sizes(data: Any, at: Any, end: Any, ends: Any) -> Any:
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
def decode_segment(segment: Any, at: Any, given: Any, wanted: Any, room: Any) -> Any:
    """Decode a segment; return the number of elements, or -1 to -3.

    Their flat indices and steps are left in the scratch, by tile, by class, then in order.
    """
    data, old, zero, (columns, cuts), rule, table = given
    positions, steps, codes, listed, sized, tile, ends = room
    start, length, nnz, nbytes = segment[0], segment[1], segment[2], segment[3]
    begin = _sizes(data, at, at + nbytes, ends)
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
        if not wanted[t]:
            skipped = True
            continue
        mine = codes, t * apart
        classes = tile, table, classify(codes, t * apart, rows * width, table, tile)
        box = width, stride, start + t * width, inverse
        into = positions, steps, found, listed, sized
        found = _decode_tile(data, span, mine, classes, box, into)
        if found < 0:
            return found
    if found > nnz or (not skipped and found != nnz):
        return np.int64(-1)
    return found


@compiled
def _decode(segments: Any, given: Any, wanted: Any, room: Any, order: Any, out: Any) -> Any:
    """Decode all segments in order; return the number of elements, or -1 to -3."""
    at, count = np.int64(0), np.int64(0)
    positions, steps = room[0], room[1]
    for s in range(segments.shape[0]):
        found = decode_segment(segments[s], at, given, wanted[s], room)
        if found < 0:
            return found
        start, used = segments[s, 0], (segments[s, 1] + 63) >> 6
        rest = out[0][count:], out[1][count:]
        _sort(positions[:found], steps, start, (order[0][:used], order[1]), rest)
        count += found
        at += segments[s, 3]
    return count


def arguments(
    segments: npt.NDArray[np.int64], streams: TileStreams, held: SegmentScratch
) -> tuple[tuple[Any, ...], npt.NDArray[np.bool_], tuple[Any, ...]]:
    """Return what :func:`decode_segment` takes: given, wanted of each segment, and room.

    ``held`` is the scratch of the thread: room begins with its positions and steps.
    """
    data, old, table, grid, wanted = streams
    room = (
        held.positions,
        held.steps.view(old.dtype),
        held.codes,
        held.listed,
        held.sized,
        held.tile,
        np.empty(grid.cuts, np.int64),
    )
    padded = np.zeros(data.size + MARGIN, np.uint8)
    padded[: data.size] = data
    # Read-only arrays have a type of their own, for which numba would compile everything again.
    classes = class_table(table.copy())
    classes = classes._replace(fold=np.uint8(classes.fold))  # numba returns a Python int
    sides = grid.columns, grid.cuts
    given = padded, old, grid.start, sides, rule_of(grid, old), classes
    chosen = np.ones((len(segments), grid.cuts), np.bool_) if wanted is None else wanted
    return given, chosen, room


def decode_tiles(segments: npt.NDArray[np.int64], streams: TileStreams) -> tuple[Indices, Bits]:
    """Decode the tiles of some segments of one tensor.

    Args:
        segments: ``(n, 6)``: start, length, nnz, bytes, 0 and 0 of each segment.

    Returns:
        ``(nnz,)`` flat int64 indices, strictly increasing inside the segments, and ``(nnz,)``
        wrapping steps, none of them zero.
    """
    nnz = int(segments[:, 2].sum())
    indices, values = slab.empty(nnz + WORD, np.int64), slab.empty(nnz, streams.old.dtype)
    held = thread_scratch(int(segments[:, 1].max(initial=0)))
    order = held.marks, held.counts
    count = _decode(segments, *arguments(segments, streams, held), order, (indices, values))
    if count < 0:
        raise ValueError(BROKEN[-count - 1])
    return indices[:count], values[:count]


# A segment's indices and steps stay in cache, and its old bits are read again while they are there.
# Elements are not put in order: weights are written at positions in any.


@compiled
def _stage(segments: Any, given: Any, wanted: Any, room: Any, place: Any, out: Any) -> Any:
    """Stage all segments; return the number of elements, or -1 to -3."""
    box, weights, keys, lanes = place
    positions, old, new = out
    at, count = np.int64(0), np.int64(0)
    for s in range(segments.shape[0]):
        found = decode_segment(segments[s], at, given, wanted[s], room)
        if found < 0:
            return found
        indices, steps = room[0][:found], room[1][:found]
        held = locate(indices, steps, box, positions[count : count + found])
        mine = slice(count, count + held)
        move(weights, indices, steps, keys, (positions[mine], old[mine], new[mine]), lanes)
        count += held
        at += segments[s, 3]
    return count


def stage_tiles(
    segments: npt.NDArray[np.int64],
    streams: TileStreams,
    box: WindowPlace,
    weights: Bits,
    key: tuple[int, int],
) -> StagedSteps:
    """Decode tiles as :func:`decode_tiles`, and stage the steps of the elements of a box."""
    held = thread_scratch(int(segments[:, 1].max(initial=0)))
    run = partial(_stage, segments, *arguments(segments, streams, held))
    return run_stage(run, segments, (), (box, weights, key), BROKEN)


@compiled
def _put(out: Any, state: Any, value: Any, count: Any) -> None:
    """Append the low ``count`` bits of a value, at most 32."""
    word, bits, at = state[0], state[1], state[2]
    word |= value << bits
    bits += _U(count)
    while bits >= _U(8):
        out[at] = np.uint8(word & _U(255))
        word >>= _U(8)
        bits -= _U(8)
        at += _U(1)
    state[0], state[1], state[2] = word, bits, at


@compiled
def _put_ones(out: Any, state: Any, count: Any) -> None:
    while count > 0:
        some = min(count, 32)
        _put(out, state, (_U(1) << _U(some)) - _U(1), some)
        count -= some


@compiled
def _put_step(out: Any, state: Any, step: Any, size: Any, element: Any) -> None:
    negative = (step >> _U(element - 1)) & _U(1)
    _put(out, state, negative, 1)
    if size == tiles.NEVER:
        return
    top = _U(0xFFFFFFFFFFFFFFFF) >> _U(64 - element)
    excess = (((_U(0) - step) if negative else step) - _U(1)) & top
    quotient = excess >> _U(size)
    if quotient >= _U(tiles.ESCAPE):
        _put_ones(out, state, tiles.ESCAPE)
        half = min(element, 32)
        _put(out, state, excess & _U(0xFFFFFFFF), half)
        if element == 64:
            _put(out, state, excess >> _U(32), 32)
        return
    _put_ones(out, state, np.int64(quotient))
    _put(out, state, _U(0), 1)
    _put(out, state, excess & ((_U(1) << _U(size)) - _U(1)), size)


@compiled
def _rank(tile: Any, count: Any, kind: Any, position: Any) -> Any:
    """Count the elements of a class, of some number of them, before a position of the tile."""
    span, offset = position // SPAN, position % SPAN
    at = SPAN_WORDS * (span * count + kind) + offset // WORD
    below = tile.members[at] & ((_U(1) << _U(offset % WORD)) - _U(1))
    return tile.starts[kind, span] + np.int64(tile.before[at]) + popcount(below)


@compiled
def _rank_in(path: Any, kind: Any, there: Any) -> Any:
    """Return a rank of a later class as one in a class, behind its elements."""
    rates, starts, spans = path
    goal, rank = there
    while goal > kind:
        goal -= 1
        rank = starts[goal, spans] + (rank >> np.int64(rates[goal + 1] - rates[goal]))
    return rank


@compiled
def _put_distance(coded: Any, state: Any, path: Any, here: Any, there: Any) -> None:
    """Write the distance of two ranks, or from one to the end."""
    rates, starts, spans = path
    (kind, rank), count = here, rates.shape[0]
    while kind < count:
        rate, total = np.int64(rates[kind]), starts[kind, spans]
        if rank < total:
            passed = ((total - 1 - rank) >> rate) + 1
            if there[0] < count:
                distance = _rank_in(path, kind, there) - rank
                if distance >> rate < passed:
                    _put_ones(coded, state, distance >> rate)
                    _put(coded, state, _U(0), 1)
                    _put(coded, state, _U(distance) & ((_U(1) << _U(rate)) - _U(1)), rate)
                    for later in range(kind + 1, there[0] + 1):
                        fewer = np.int64(rates[later] - rates[later - 1])
                        low = _U(_rank_in(path, later, there)) & ((_U(1) << _U(fewer)) - _U(1))
                        _put(coded, state, low, fewer)
                    return
            _put_ones(coded, state, passed)
            rank += passed << rate
        rank -= total
        kind += 1
        if kind < count:
            rank <<= np.int64(rates[kind]) - rate


@compiled
def _encode_tile(codes: Any, classes: Any, changes: Any, places: Any, coded: Any) -> Any:
    """Write the bits of one tile to the beginning of ``coded``; return their bytes."""
    tile, table, spans = classes
    positions, steps = changes
    ranks, kinds = places
    count = table.rates.shape[0]
    for i in range(positions.shape[0]):
        kinds[i] = table.by_bin[codes[positions[i]]]
        ranks[i] = _rank(tile, count, np.int64(kinds[i]), positions[i])
    state = np.zeros(3, np.uint64)
    element, path = np.int64(8 * steps.itemsize), (table.rates, tile.starts, spans)
    here = np.int64(0), np.int64(0)
    for c in range(count):
        for i in range(positions.shape[0]):
            if kinds[i] != c:
                continue
            _put_distance(coded, state, path, here, (np.int64(c), ranks[i]))
            size = np.int64(table.sizes[codes[positions[i]]])
            _put_step(coded, state, _U(steps[i]), size, element)
            here = np.int64(c), ranks[i] + 1
    _put_distance(coded, state, path, here, (np.int64(count), np.int64(0)))
    if state[1]:
        _put(coded, state, _U(0), 8 - np.int64(state[1]))
    return np.int64(state[2])


@compiled
def _in_tile(indices: Any, steps: Any, start: Any, grid: Any, number: Any, out: Any) -> Any:
    """Find the changes of one tile of a segment; return how many there are."""
    columns, cuts = grid
    positions, mine = out
    width = columns // cuts
    count = 0
    for i in range(indices.shape[0]):
        offset = indices[i] - start
        if cuts > 1:
            row, column = offset // columns, offset % columns - number * width
            if column < 0 or column >= width:
                continue
            offset = row * width + column
        positions[count], mine[count] = offset, steps[i]
        count += 1
    return count


@compiled
def _put_sizes(ends: Any, data: Any, to: Any) -> Any:
    """Write the sizes of all tiles but the last one; return the byte behind them."""
    for t in range(ends.shape[0] - 1):
        value = ends[t] - (ends[t - 1] if t else 0)
        while value > 127:
            data[to] = np.uint8(value & 127 | 128)
            value >>= 7
            to += 1
        data[to] = np.uint8(value)
        to += 1
    return to


@compiled
def _encode(windows: Any, changes: Any, old: Any, how: Any, scratch: Any, out: Any) -> Any:
    """Encode all segments; return the number of bytes."""
    indices, steps = changes
    columns, cuts, first, rule, coded_table = how
    table = class_table(coded_table)
    ranks, kinds, mine, positions, coded, codes, tile = scratch
    data, nbytes = out
    ends = np.empty(cuts, np.int64)
    low, to = 0, np.int64(0)
    for s in range(windows.shape[0]):
        start, length = windows[s, 0], windows[s, 1]
        high = low
        while high < indices.shape[0] and indices[high] < start + length:
            high += 1
        width, rows = length, np.int64(1)
        if cuts > 1:
            width, rows = columns // cuts, length // columns
        apart = bin_segment(old[start - first :], (rows, width * cuts), cuts, rule, codes)
        at = np.int64(0)
        for t in range(cuts):
            into = positions, mine
            n = _in_tile(indices[low:high], steps[low:high], start, (columns, cuts), t, into)
            there = codes[t * apart :]
            classes = tile, table, classify(codes, t * apart, rows * width, table, tile)
            places = ranks[:n], kinds[:n]
            found = positions[:n], mine[:n]
            at += _encode_tile(there, classes, found, places, coded[at:])
            ends[t] = at
        begin, to = to, _put_sizes(ends, data, to)
        data[to : to + at] = coded[:at]
        to += at
        nbytes[s] = to - begin
        low = high
    return to


def encode_tiles(
    windows: npt.NDArray[np.int64],
    indices: Indices,
    steps: Bits,
    old: Bits,
    table: tiles.Bytes,
    grid: tiles.TileGrid,
) -> tiles.CodedTiles:
    """Encode the changes of some segments.

    Args:
        windows: ``(n, 2)``: start and length of each segment, ascending.
        indices: ``(nnz,)`` flat indices of changed elements, increasing, all in a segment.
        steps: ``(nnz,)`` wrapping steps, not zero.
        old: Bits before the change, from flat index ``grid.start`` on.
        table: ``(512,)``: the rate of each bin, then its size; no rate of a changed element's bin
            is ``NEVER``.
    """
    held = thread_scratch(int(windows[:, 1].max(initial=0)))
    counts = np.diff(np.searchsorted(indices, [*windows[:, 0], int(windows[-1].sum())]))
    most = int(counts.max(initial=0))
    room = [
        tiles.most_nbytes(length, count, grid.cuts)
        for length, count in zip(windows[:, 1].tolist(), counts.tolist(), strict=True)
    ]
    scratch = (
        np.empty(most, np.int64),
        np.empty(most, np.uint8),
        np.empty(most, steps.dtype),
        np.empty(most, np.int64),
        np.empty(max(room), np.uint8),
        held.codes,
        held.tile,
    )
    data, nbytes = np.empty(sum(room), np.uint8), np.empty(len(windows), np.int64)
    how = grid.columns, grid.cuts, grid.start, rule_of(grid, old), table
    end = _encode(windows, (indices, steps), old, how, scratch, (data, nbytes))
    return tiles.CodedTiles(data[:end].copy(), nbytes)
