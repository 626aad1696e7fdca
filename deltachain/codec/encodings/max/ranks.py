"""Compiled kernel that reads the ranks and steps of a class from the bits of a tile.

Eight bytes hold what an element usually takes; longer ones are read again, from their own bits on.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from deltachain.codec.encodings.max.tiles import ESCAPE, NEVER
from deltachain.codec.encodings.max.words import WORD, load_word, lowest
from deltachain.kernels.compiling import compiled, inlined

_U = np.uint64
_ALL: Final = _U(0xFFFFFFFFFFFFFFFF)
_AT_HAND: Final = WORD - 7
"""Bits of the eight bytes around a bit, from that on, at least."""

MARGIN: Final = 32
"""Bytes that are read behind the last tile, at most; they must be zero."""


@inlined
def peek(data: Any, at: Any) -> Any:  # noqa: ANN401
    """Return 64 bits from bit ``at`` on."""
    byte, shift = at >> 3, _U(at & 7)
    behind = _U(data[_U(byte + 8)]) << _U(1)
    return (load_word(data, byte) >> shift) | (behind << (_U(63) - shift))


@compiled
def _run(data: Any, at: Any, most: Any, end: Any) -> Any:  # noqa: ANN401
    """Count one bits from bit ``at`` on, up to ``most``, not far beyond ``end``."""
    count = np.int64(0)
    while count < most and at + count < end:
        ones = lowest(~peek(data, at + count))
        count += ones
        if ones < WORD:
            break
    return min(count, most)


@compiled
def _far_excess(data: Any, at: Any, size: Any, width: Any) -> Any:  # noqa: ANN401
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
def _excess(data: Any, x: Any, bits: Any, size: Any, width: Any) -> Any:  # noqa: ANN401
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
def enter_class(data: Any, at: Any, begin: Any, more: Any) -> Any:  # noqa: ANN401
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
def read_ranks(data: Any, span: Any, kind: Any, members: Any, out: Any) -> Any:  # noqa: ANN401
    """Append ranks and steps of a class.

    Returns their number, or -1 or -2 if a rule is broken; the bit behind them; the rank reached,
    less the elements of the class; and whether that element changed.

    Args:
        data: Bytes of all tiles, and ``MARGIN`` zeros.
        span: First bit of the class, and the bit behind its tile.
        kind: Rate; size; whether sizes are mixed, and if so the size of each element by rank.
        members: Elements of the class; the rank to begin at, and whether its element changed.
        out: Ranks, steps, and the number of both so far.
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
