"""Rounding of weights to codes in Triton, for the fused diff: integers from the quotient on.

A weight is cast, scaled by one fp32 multiplication or division, and rounded by integer operations,
so that every card and the interpreter have the bits of :func:`.factors.codes_by_factors`.
"""

from __future__ import annotations

import triton
import triton.language as tl

NONE = tl.constexpr(-1)
"""Rounding of weights that are not quantised."""


@triton.jit
def _bf16_word(word: tl.tensor) -> tl.tensor:
    """Round finite fp32 bits to those of bf16, which stay fp32 bits."""
    return (word + 0x7FFF + ((word >> 16) & 1)) & 0xFFFF0000


@triton.jit
def _shifted(size: tl.tensor, shift: tl.tensor) -> tl.tensor:
    """Divide the significand of fp32 magnitudes by a power of two: nearest, ties to even."""
    shift = tl.minimum(shift, 25)  # from there on 0
    significand = (size & 0x7FFFFF) | 0x800000
    whole = significand >> shift
    rest = significand & ((1 << shift) - 1)
    half = 1 << (shift - 1)
    up = (rest > half) | ((rest == half) & ((whole & 1) == 1))
    return whole + up.to(tl.int32)


@triton.jit
def _to_int8(word: tl.tensor) -> tl.tensor:
    """Round the fp32 bits of a quotient to int8."""
    negative = (word >> 31) == 1
    size = tl.minimum((word & 0x7FFFFFFF).to(tl.int32), 0x43000000)  # 128
    whole = _shifted(size, 150 - (size >> 23))
    return tl.where(negative, -whole, tl.minimum(whole, 127)).to(tl.uint8)


@triton.jit
def _to_fp8(word: tl.tensor, keep: tl.constexpr) -> tl.tensor:
    """Round fp32 bits to e4m3; keep the sign of -0.0, or not."""
    size = tl.minimum((word & 0x7FFFFFFF).to(tl.int32), 0x43E00000)  # 448
    normal = (size - 0x3BF80001 + ((size >> 20) & 1)) >> 20
    small = _shifted(size, 141 - (size >> 23))
    sign = ((word >> 24) & 0x80).to(tl.int32)
    if not keep:
        sign = tl.where(size == 0, 0, sign)
    return (tl.where(size < 0x3C800000, small, normal) | sign).to(tl.uint8)


@triton.jit
def codes_of(
    weights: tl.tensor,
    table: tl.tensor,
    blocks: tl.tensor,
    inside: tl.tensor,
    master: tl.constexpr,
    rounding: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    size: tl.constexpr,
) -> tl.tensor:
    """Make the codes of this program's block of weights.

    Args:
        weights: Bits of the weights.
        table: Columns of blocks (:data:`.factors.COLUMNS`) behind the three of a diff.
        blocks: Number of blocks.
        inside: Which lanes have a weight.
        master: Whether the weights are fp32.
        rounding: Number of the rounding.
        height: Rows of a block of factors; 0 for all.
        width: Columns of it; 0 for all.
        size: Number of lanes.
    """
    mine = table + 3 * blocks + tl.program_id(0)
    factors = tl.load(mine).to(tl.pointer_type(tl.float32))
    row = tl.load(mine + blocks).to(tl.int32)
    first = tl.load(mine + 2 * blocks).to(tl.int32)
    columns = tl.load(mine + 3 * blocks).to(tl.int32)
    column = first + tl.arange(0, size)
    line = tl.zeros((size,), tl.int32) + row
    if first + size > columns:  # of more than one row: a division is many instructions
        line += column // columns
        column %= columns
    at = tl.zeros((size,), tl.int32)
    if height > 0:
        at += (line // height) * tl.load(mine + 5 * blocks).to(tl.int32)
    if width > 0:
        at += (column + tl.load(mine + 4 * blocks).to(tl.int32)) // width
    factor = tl.load(factors + at, mask=inside, other=1.0)
    if master:
        word = _bf16_word(weights.to(tl.uint32, bitcast=True))
    else:
        word = weights.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    number = word.to(tl.float32, bitcast=True)
    if rounding == 2:
        scaled = (number * factor).to(tl.uint32, bitcast=True)
        return _to_fp8(scaled, True)
    divided = tl.div_rn(number, factor).to(tl.uint32, bitcast=True)
    if rounding == 1:
        return _to_fp8(_bf16_word(divided), False)
    return _to_int8(_bf16_word(divided))
