"""Codes of quantised weights on the host; numba only.

The results are those of the libraries that define the recipes, bit for bit
(``tests/unit/publish/test_host_codes.py``). Weights are bf16, or fp32 masters that are cast on the
way (FORMAT.md 4, Casts). Each loop keeps a weight in registers from its bits to its code.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from deltachain.kernels.bitcasts import (
    bf16_magnitude,
    bf16_word,
    bits_of_float,
    divided,
    float_of_bits,
    magnitude,
)
from deltachain.kernels.compiling import compiled, inlined
from deltachain.kernels.quantised import KINDS, Rounding, WindowBlocks

WeightBits: TypeAlias = "npt.NDArray[np.uint16] | npt.NDArray[np.uint32]"
"""Bits of ``(N, K)`` bf16 or fp32 weights, contiguous."""

_U = np.uint32
_F = np.float32
_LARGEST: Final = _U(0x43E00000)
"""Bits of 448, the largest fp8 number."""
_LOWEST: Final = _U(121 << 23)
"""Bits of 2**-6, the smallest normal fp8 number."""
_BASE: Final = _U(0xC407FFFF)
"""The difference of the exponents' biases, and half a unit."""
_SUBNORMAL: Final = _F(16384.0)
"""2**14: fp32 numbers there are as far apart as subnormal fp8 numbers."""
_INTEGER: Final = _F(12582912.0)
"""1.5 * 2**23: fp32 numbers there are integers, whose lowest byte is the code."""


@compiled
def _quotient(bits: Any, factor: Any) -> Any:  # noqa: ANN401
    """Divide, and round to bf16, as torch does."""
    return bf16_word(bits_of_float(divided(float_of_bits(bf16_word(bits)), factor)))


@compiled
def _to_fp8(bits: Any) -> Any:  # noqa: ANN401
    """Round fp32 bits to e4m3: nearest, ties to even."""
    size = _U(min(_U(bits & _U(0x7FFFFFFF)), _LARGEST))
    half = _U(_BASE + _U(_U(size >> _U(20)) & _U(1)))
    normal = _U(_U(size + half) >> _U(20))
    small = bits_of_float(float_of_bits(size) + _SUBNORMAL)  # its lowest byte is the code
    sign = _U(_U(bits >> _U(24)) & _U(0x80))
    return np.uint8(_U((small if size < _LOWEST else normal) | sign))


@compiled
def _divide_to_int8(weights: Any, factor: Any, out: Any) -> None:  # noqa: ANN401
    for i in range(weights.shape[0]):
        number = float_of_bits(_quotient(weights[i], factor))
        clamped = min(max(number, _F(-128.0)), _F(127.0))
        out[i] = np.uint8(bits_of_float(clamped + _INTEGER) & _U(0xFF))


@compiled
def _divide_to_fp8(weights: Any, factor: Any, out: Any) -> None:  # noqa: ANN401
    """Turn -0.0 into 0.0 before the rounding, as adding a zero point does."""
    for i in range(weights.shape[0]):
        number = float_of_bits(_quotient(weights[i], factor)) + _F(0.0)
        out[i] = _to_fp8(bits_of_float(number))


@compiled
def _multiply_to_fp8(weights: Any, factor: Any, out: Any) -> None:  # noqa: ANN401
    for i in range(weights.shape[0]):
        out[i] = _to_fp8(bits_of_float(float_of_bits(bf16_word(weights[i])) * factor))


@inlined
def fill_codes(weights: Any, factor: Any, out: Any, kind: int) -> None:  # noqa: ANN401
    """Write the codes of some finite weights of one block."""
    if kind == 0:
        _divide_to_int8(weights, factor, out)
    elif kind == 1:
        _divide_to_fp8(weights, factor, out)
    else:
        _multiply_to_fp8(weights, factor, out)


@compiled
def _codes(
    values: Any,  # noqa: ANN401
    factors: Any,  # noqa: ANN401
    at: tuple[int, int],
    block: tuple[int, int],
    out: Any,  # noqa: ANN401
    kind: int,
) -> None:
    rows, columns = values.shape
    for row in range(rows):
        line, low = factors[(row + at[0]) // block[0]], 0
        while low < columns:
            place = low + at[1]
            high = min(columns, low + block[1] - place % block[1])
            fill_codes(values[row, low:high], line[place // block[1]], out[row, low:high], kind)
            low = high


def quantise_codes(
    values: WeightBits,
    factors: npt.NDArray[np.float32],
    blocks: WindowBlocks,
    rounding: Rounding,
    out: npt.NDArray[np.uint8],
) -> None:
    """Quantise finite weights.

    Args:
        values: Bits of ``(N, K)`` weights.
        factors: Positive finite factor of each block, ``(R, C)``.
        blocks: Where the blocks are.
        rounding: How a weight and its factor make a code.
        out: Bits of ``(N, K)`` codes, to be written.
    """
    _codes(values, factors, blocks.at, blocks.size, out, KINDS[rounding])


@compiled
def _largest_magnitude(values: Any) -> Any:  # noqa: ANN401
    most = magnitude(values[0])
    for i in range(values.shape[0]):
        most = max(most, magnitude(values[i]))
    return bf16_magnitude(most)


@compiled
def raise_amax(values: Any, at: tuple[int, int], block: tuple[int, int], out: Any) -> None:  # noqa: ANN401
    """Raise the largest magnitudes of blocks, as bf16 bits, to those of some whole rows."""
    rows, columns = values.shape
    for row in range(rows):
        line, low = out[(row + at[0]) // block[0]], 0
        while low < columns:
            place = low + at[1]
            high = min(columns, low + block[1] - place % block[1])
            one = place // block[1]
            line[one] = max(line[one], _largest_magnitude(values[row, low:high]))
            low = high


def block_amax(values: WeightBits, blocks: WindowBlocks, out: npt.NDArray[np.uint16]) -> None:
    """Find the largest magnitude of each block, as bf16: magnitudes ascend with their bits.

    Args:
        values: Bits of ``(N, K)`` weights.
        blocks: Where the blocks are.
        out: Bits of ``(R, C)`` magnitudes to raise; infinite or NaN where a weight is, or where one
            of fp32 is too large for bf16.
    """
    raise_amax(values, blocks.at, blocks.size, out)
