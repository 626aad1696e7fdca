"""Compiled kernels that encode tiles; see :mod:`.tiles`."""

from typing import Any

import numpy as np
import numpy.typing as npt

from deltachain.codec.encodings.max import tiles
from deltachain.codec.encodings.max.classes import (
    SPAN,
    SPAN_WORDS,
    WORD,
    bin_segment,
    class_table,
    classify,
    popcount,
    rule_of,
    thread_scratch,
)
from deltachain.kernels.compiling import compiled
from deltachain.types import Bits, Indices

_U = np.uint64


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
