"""Codes of quantised weights on the host, in one pass; numba only.

The results are those of the libraries that define the recipes, bit for bit
(``tests/unit/publish/test_host_codes.py``). A tile of a row is unpacked, scaled, rounded and
packed while it is in the cache; each loop is one that LLVM vectorises.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from deltachain.kernels.compiling import compiled

Rounding: TypeAlias = Literal["int8-divide", "fp8-divide", "fp8-multiply"]
"""Code of ``x``: int8 or fp8 e4m3 of ``bf16(x / factor)``, or fp8 e4m3 of ``x * factor``."""

TILE: Final = 512
"""Largest number of elements handled at a time: all buffers stay in the first cache."""

_LARGEST: Final = np.float32(448.0)
_LOWEST: Final = np.uint32(121 << 23)
"""Bits of 2**-6, the smallest normal fp8 number."""
_SUBNORMAL: Final = np.uint32(141 << 23)
"""Bits of 2**14: fp32 numbers there are as far apart as subnormal fp8 numbers."""
_INTEGER: Final = np.float32(12582912.0)
"""1.5 * 2**23: fp32 numbers there are integers, whose lowest byte is the code."""


@compiled
def _unpack(values: Any, bits: Any) -> None:  # noqa: ANN401
    for i in range(values.shape[0]):
        bits[i] = np.uint32(values[i]) << np.uint32(16)


@compiled
def _divide(number: Any, bits: Any, factor: Any) -> None:  # noqa: ANN401
    """Divide; round to bf16, as torch does; turn -0.0 into 0.0, as adding a zero point does."""
    for i in range(number.shape[0]):
        number[i] /= factor
    for i in range(number.shape[0]):
        b = bits[i]
        bits[i] = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) & np.uint32(
            0xFFFF0000
        )
    for i in range(number.shape[0]):
        number[i] += np.float32(0.0)


@compiled
def _to_int8(number: Any, bits: Any, out: Any) -> None:  # noqa: ANN401
    for i in range(number.shape[0]):
        clamped = min(max(number[i], np.float32(-128.0)), np.float32(127.0))
        number[i] = clamped + _INTEGER
    for i in range(number.shape[0]):
        out[i] = np.uint8(bits[i] & np.uint32(0xFF))


@compiled
def _to_fp8(number: Any, bits: Any, shifted: Any, shifted_bits: Any, out: Any) -> None:  # noqa: ANN401
    """Round to e4m3: nearest, ties to even."""
    base = np.uint32(0xC407FFFF)  # the difference of the exponents' biases, and half a unit
    for i in range(number.shape[0]):
        clamped = min(max(number[i], -_LARGEST), _LARGEST)
        number[i] = clamped
        shifted[i] = abs(clamped) + np.float32(16384.0)
    for i in range(number.shape[0]):
        b = bits[i] & np.uint32(0x7FFFFFFF)
        normal = (b + base + ((b >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
        small = shifted_bits[i] - _SUBNORMAL
        sign = (bits[i] >> np.uint32(24)) & np.uint32(0x80)
        out[i] = np.uint8((small if b < _LOWEST else normal) | sign)


@compiled
def _codes(
    values: Any,  # noqa: ANN401
    factors: Any,  # noqa: ANN401
    at: tuple[int, int],
    block: tuple[int, int],
    out: Any,  # noqa: ANN401
    kind: int,
) -> None:
    number, shifted = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    bits, shifted_bits = number.view(np.uint32), shifted.view(np.uint32)
    rows, columns = values.shape
    for row in range(rows):
        line = factors[(row + at[0]) // block[0]]
        low = 0
        while low < columns:
            place = low + at[1]
            high = min(columns, low + TILE, low + block[1] - place % block[1])
            n, factor = high - low, line[place // block[1]]
            tile, to = values[row, low:high], out[row, low:high]
            _unpack(tile, bits[:n])
            if kind == 2:
                for i in range(n):
                    number[i] *= factor
            else:
                _divide(number[:n], bits[:n], factor)
            if kind == 0:
                _to_int8(number[:n], bits[:n], to)
            else:
                _to_fp8(number[:n], bits[:n], shifted[:n], shifted_bits[:n], to)
            low = high


_KINDS: Final[dict[str, int]] = {"int8-divide": 0, "fp8-divide": 1, "fp8-multiply": 2}


def quantise_codes(
    values: npt.NDArray[np.uint16],
    factors: npt.NDArray[np.float32],
    at: tuple[int, int],
    block: tuple[int, int],
    rounding: Rounding,
    out: npt.NDArray[np.uint8],
) -> None:
    """Quantise finite bf16 values.

    Args:
        values: Bits of ``(N, K)`` bf16 values, contiguous.
        factors: Positive finite factor of each block, ``(R, C)``.
        at: Row and column of the first value in the first block.
        block: Rows and columns of a block.
        rounding: How a value and its factor make a code.
        out: Bits of ``(N, K)`` codes, to be written.
    """
    _codes(values, factors, at, block, out, _KINDS[rounding])


@compiled
def _largest_magnitude(values: Any) -> Any:  # noqa: ANN401
    most = np.uint16(0)
    for i in range(values.shape[0]):
        most = max(most, np.uint16(values[i] & np.uint16(0x7FFF)))
    return most


@compiled
def _block_amax(values: Any, at: tuple[int, int], block: tuple[int, int], out: Any) -> None:  # noqa: ANN401
    rows, columns = values.shape
    for row in range(rows):
        line, low = out[(row + at[0]) // block[0]], 0
        while low < columns:
            place = low + at[1]
            high = min(columns, low + block[1] - place % block[1])
            one = place // block[1]
            line[one] = max(line[one], _largest_magnitude(values[row, low:high]))
            low = high


def block_amax(
    values: npt.NDArray[np.uint16],
    at: tuple[int, int],
    block: tuple[int, int],
    out: npt.NDArray[np.uint16],
) -> None:
    """Find the largest magnitude of each block of bf16 values: magnitudes ascend with their bits.

    Args:
        values: Bits of ``(N, K)`` bf16 values, contiguous.
        at: Row and column of the first value in the first block.
        block: Rows and columns of a block.
        out: Bits of ``(R, C)`` magnitudes, 0 before; infinite or NaN where a value is.
    """
    _block_amax(values, at, block, out)
