"""Bit casts between fp32 and its bits in compiled kernels: what numba has for arrays alone.

A loop that keeps both in registers is one that LLVM vectorises whole; views of arrays would have
to be written and read again. Sums of 32 bits are cast back at once, since numba widens them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

_U = np.uint32
_intrinsic: Final[Any] = intrinsic  # untyped


@_intrinsic
def bits_of_float(typing_context: Any, number: Any) -> Any:  # noqa: ANN401
    """Return the bits of an fp32 number, as uint32."""
    del typing_context, number

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        del context, signature
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@_intrinsic
def float_of_bits(typing_context: Any, bits: Any) -> Any:  # noqa: ANN401
    """Return the fp32 number with the given uint32 bits."""
    del typing_context, bits

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        del context, signature
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@_intrinsic
def divided(typing_context: Any, number: Any, by: Any) -> Any:  # noqa: ANN401
    """Divide fp32 numbers as IEEE 754 has it; no test of the divisor, which prevents vectors."""
    del typing_context, number, by

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        del context, signature
        return builder.fdiv(*arguments)

    return types.float32(types.float32, types.float32), generate


def bf16_word(bits: Any) -> Any:  # noqa: ANN401
    """Return what a weight is as bf16, as bits of fp32: of bf16 bits, or of finite fp32 ones."""
    raise NotImplementedError  # compiled code only


@overload(bf16_word)
def _bf16_word(bits: Any) -> Any:  # noqa: ANN401
    if bits is types.uint16:
        return _widened
    return _rounded if bits is types.uint32 else None


def _widened(bits: Any) -> Any:  # noqa: ANN401
    return _U(_U(bits) << _U(16))


def _rounded(bits: Any) -> Any:  # noqa: ANN401
    """Round to nearest, ties to even (FORMAT.md 4, Casts)."""
    half = _U(_U(0x7FFF) + _U(_U(bits >> _U(16)) & _U(1)))
    return _U(_U(bits + half) & _U(0xFFFF0000))


def magnitude(bits: Any) -> Any:  # noqa: ANN401
    """Return the bits of a weight, bf16 or fp32, without its sign."""
    raise NotImplementedError  # compiled code only


@overload(magnitude)
def _magnitude(bits: Any) -> Any:  # noqa: ANN401
    if bits is types.uint16:
        return _magnitude16
    return _magnitude32 if bits is types.uint32 else None


def _magnitude16(bits: Any) -> Any:  # noqa: ANN401
    return np.uint16(bits & np.uint16(0x7FFF))


def _magnitude32(bits: Any) -> Any:  # noqa: ANN401
    return _U(bits & _U(0x7FFFFFFF))


def bf16_magnitude(bits: Any) -> Any:  # noqa: ANN401
    """Return the bf16 bits of the largest magnitude of weights, of its bits."""
    raise NotImplementedError  # compiled code only


@overload(bf16_magnitude)
def _bf16_magnitude(bits: Any) -> Any:  # noqa: ANN401
    if bits is types.uint16:
        return _same
    return _cast if bits is types.uint32 else None


def _same(bits: Any) -> Any:  # noqa: ANN401
    return bits


def _cast(bits: Any) -> Any:  # noqa: ANN401
    """Cast, NaN too: the cast keeps the order of magnitudes, so that one for all will do."""
    if bits > _U(0x7F800000):
        return np.uint16((bits >> _U(16)) | _U(0x40))
    return np.uint16((bits + _U(0x7FFF) + ((bits >> _U(16)) & _U(1))) >> _U(16))
