"""Operations on words of 64 bits that numba has no function for, as LLVM instructions.

LLVM has each of them on every machine: where there is no such instruction it makes a few others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

WORD: Final = 64
"""Bits of a word."""


def _instruction(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let compiled code call what a function generates, without its first argument."""
    found: Callable[..., Any] = intrinsic(function)
    return found


@_instruction
def popcount(typing_context: Any, word: Any) -> Any:  # noqa: ANN401, ARG001
    """Count the one bits of a uint64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401, ARG001
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate


@_instruction
def lowest(typing_context: Any, word: Any) -> Any:  # noqa: ANN401, ARG001
    """Return the number of the lowest one bit of a uint64; 64 if there is none."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401, ARG001
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@_instruction
def range_mask(typing_context: Any, codes: Any, at: Any, low: Any, span: Any) -> Any:  # noqa: ANN401, ARG001
    """Compare 64 bytes from ``codes[at]`` on; bit ``n`` is set if byte ``n`` is in a range.

    The range begins at ``low`` and has ``span`` more values, wrapping at 256.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401
        array = context.make_array(signature.args[0])(context, builder, args[0])
        lanes = ir.VectorType(ir.IntType(8), WORD)
        where = builder.bitcast(builder.gep(array.data, [args[1]]), lanes.as_pointer())
        some = builder.load(where, align=1)
        above = builder.sub(some, _splat(builder, args[2], lanes))
        inside = builder.icmp_unsigned("<=", above, _splat(builder, args[3], lanes))
        return builder.bitcast(inside, ir.IntType(WORD))

    bytes_ = types.Array(types.uint8, 1, "C")
    return types.uint64(bytes_, types.int64, types.uint8, types.uint8), generate


def _splat(builder: Any, value: Any, lanes: Any) -> Any:  # noqa: ANN401
    one = builder.insert_element(ir.Constant(lanes, ir.Undefined), value, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), WORD), [0] * WORD)
    return builder.shuffle_vector(one, ir.Constant(lanes, ir.Undefined), zeros)
