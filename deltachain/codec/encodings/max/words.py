"""Operations on words of 64 bits, in a form that LLVM makes one or two instructions of."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from deltachain.kernels.compiling import compiled, inlined

WORD: Final = 64
"""Bits of a word."""

_U = np.uint64
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


@intrinsic  # type: ignore[untyped-decorator]
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
