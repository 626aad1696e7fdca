"""Codes of quantised weights on the host; numba only.

The results are those of the libraries that define the recipes, bit for bit
(``tests/unit/publish/test_wire_dtypes.py``). Each loop keeps a weight in registers from its bits to
its code, so that LLVM vectorises it whole.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import intrinsic

from deltachain.kernels.compiling import compiled, inlined

# Sums of 32 bits are cast back at once, since numba widens them.

_intrinsic: Final[Any] = intrinsic  # untyped


@_intrinsic
def _divided(typing_context: Any, number: Any, by: Any) -> Any:
    """Divide fp32 numbers as IEEE 754 has it; no test of the divisor, which prevents vectors."""
    del typing_context, number, by

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        return builder.fdiv(*arguments)

    return types.float32(types.float32, types.float32), generate


KINDS: Final = {"int8-divide": 0, "fp8-divide": 1, "fp8-multiply": 2}  # number of each way to round
_U = np.uint32
_F = np.float32
_LARGEST: Final = _U(0x43E00000)  # bits of 448, the largest fp8 number
_LOWEST: Final = _U(121 << 23)  # bits of 2**-6, the smallest normal fp8 number
_BASE: Final = _U(0xC407FFFF)  # the difference of the exponents' biases, and half a unit
_SUBNORMAL: Final = _F(16384.0)
"""2**14: fp32 numbers there are as far apart as subnormal fp8 numbers."""
_INTEGER: Final = _F(12582912.0)
"""1.5 * 2**23: fp32 numbers there are integers, whose lowest byte is the code."""


@compiled
def _number(weight: Any) -> Any:
    return _U(_U(weight) << _U(16)).view(_F)


@compiled
def _quotient(weight: Any, factor: Any) -> Any:
    """Divide, and round to bf16, as torch does."""
    bits = _F(_divided(_number(weight), factor)).view(_U)
    half = _U(_U(0x7FFF) + _U(_U(bits >> _U(16)) & _U(1)))
    return _U(_U(bits + half) & _U(0xFFFF0000)).view(_F)


@compiled
def _to_fp8(bits: Any) -> Any:
    """Round fp32 bits to e4m3: nearest, ties to even."""
    size = _U(min(_U(bits & _U(0x7FFFFFFF)), _LARGEST))
    half = _U(_BASE + _U(_U(size >> _U(20)) & _U(1)))
    normal = _U(_U(size + half) >> _U(20))
    small = _F(_U(size).view(_F) + _SUBNORMAL).view(_U)  # its lowest byte is the code
    sign = _U(_U(bits >> _U(24)) & _U(0x80))
    return np.uint8(_U((small if size < _LOWEST else normal) | sign))


@compiled
def _divide_to_int8(weights: Any, factor: Any, out: Any) -> None:
    for i in range(weights.shape[0]):
        clamped = min(max(_quotient(weights[i], factor), _F(-128.0)), _F(127.0))
        out[i] = np.uint8(_F(clamped + _INTEGER).view(_U) & _U(0xFF))


@compiled
def _divide_to_fp8(weights: Any, factor: Any, out: Any) -> None:
    """Turn -0.0 into 0.0 before the rounding, as adding a zero point does."""
    for i in range(weights.shape[0]):
        out[i] = _to_fp8(_F(_quotient(weights[i], factor) + _F(0.0)).view(_U))


@compiled
def _multiply_to_fp8(weights: Any, factor: Any, out: Any) -> None:
    for i in range(weights.shape[0]):
        out[i] = _to_fp8(_F(_number(weights[i]) * factor).view(_U))


@inlined
def _fill_codes(weights: Any, factor: Any, out: Any, kind: int) -> None:
    if kind == 0:
        _divide_to_int8(weights, factor, out)
    elif kind == 1:
        _divide_to_fp8(weights, factor, out)
    else:
        _multiply_to_fp8(weights, factor, out)


@compiled
def quantise_codes(
    values: npt.NDArray[np.uint16],
    factors: npt.NDArray[np.float32],
    at: tuple[int, int],
    block: tuple[int, int],
    out: npt.NDArray[np.uint8],
    kind: int,
) -> None:
    """Quantise finite weights.

    Args:
        values: Bits of ``(N, K)`` bf16 weights.
        factors: Positive finite factor of each block, ``(R, C)``.
        at: Row and column of the first weight in its first block.
        block: Rows and columns of a block.
        out: Bits of ``(N, K)`` codes, to be written.
    """
    rows, columns = values.shape
    for row in range(rows):
        line, low = factors[(row + at[0]) // block[0]], 0
        while low < columns:
            place = low + at[1]
            high = min(columns, low + block[1] - place % block[1])
            _fill_codes(values[row, low:high], line[place // block[1]], out[row, low:high], kind)
            low = high
