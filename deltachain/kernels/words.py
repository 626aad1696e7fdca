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

_Pair: Final[Any] = types.UniTuple  # untyped


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
def bin_word(typing_context: Any, old: Any, at: Any, rule: Any, codes: Any, to: Any) -> Any:  # noqa: ANN401, ARG001
    """Write the bins of 64 elements from ``old[at]`` on to ``codes[to]`` and behind it.

    ``rule`` is the shift and the mask, in the dtype of the elements.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401
        elements, bins = signature.args[0], signature.args[3]
        wide = ir.VectorType(ir.IntType(elements.dtype.bitwidth), WORD)
        narrow = ir.VectorType(ir.IntType(8), WORD)
        some = builder.load(_address(context, builder, elements, args[:2], wide), align=1)
        shift, mask = (_splat(builder, builder.extract_value(args[2], n), wide) for n in (0, 1))
        found = builder.and_(builder.lshr(some, shift), mask)
        if elements.dtype.bitwidth > 8:
            found = builder.trunc(found, narrow)
        builder.store(found, _address(context, builder, bins, args[3:], narrow), align=1)
        return context.get_dummy_value()

    return types.void(old, types.int64, rule, codes, types.int64), generate


@_instruction
def equal_mask(typing_context: Any, codes: Any, at: Any, code: Any) -> Any:  # noqa: ANN401, ARG001
    """Compare 64 bytes from ``codes[at]`` on; bit ``n`` is set if byte ``n`` is ``code``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401
        lanes = ir.VectorType(ir.IntType(8), WORD)
        some = builder.load(_address(context, builder, signature.args[0], args[:2], lanes), align=1)
        same = builder.icmp_unsigned("==", some, _splat(builder, args[2], lanes))
        return builder.bitcast(same, ir.IntType(WORD))

    return types.uint64(codes, types.int64, types.uint8), generate


@_instruction
def range_mask(typing_context: Any, codes: Any, at: Any, run: Any) -> Any:  # noqa: ANN401, ARG001
    """Compare 64 bytes from ``codes[at]`` on; bit ``n`` is set if byte ``n`` is in a run.

    A run is its first value, the number of its others, and a mask: 255, or 127 where the values
    with another highest bit are in it too.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401
        lanes = ir.VectorType(ir.IntType(8), WORD)
        some = builder.load(_address(context, builder, signature.args[0], args[:2], lanes), align=1)
        low, more, mask = (
            _splat(builder, builder.extract_value(args[2], n), lanes) for n in range(3)
        )
        above = builder.and_(builder.sub(some, low), mask)
        inside = builder.icmp_unsigned("<=", above, more)
        return builder.bitcast(inside, ir.IntType(WORD))

    return types.uint64(codes, types.int64, run), generate


@_instruction
def count_eight(typing_context: Any, words: Any, at: Any) -> Any:  # noqa: ANN401, ARG001
    """Count the one bits of eight uint64 from ``words[at]`` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401
        counts = _counts(context, builder, signature.args[0], args)
        for distance in (4, 2, 1):
            lanes = [n ^ distance for n in range(8)]
            counts = builder.add(counts, _lanes(builder, counts, counts, lanes))
        return builder.zext(builder.extract_element(counts, ir.IntType(32)(0)), ir.IntType(64))

    return types.int64(words, types.int64), generate


@_instruction
def full_of_eight(typing_context: Any, words: Any, at: Any, rank: Any) -> Any:  # noqa: ANN401, ARG001
    """Find the one bit of a rank among those of eight uint64 from ``words[at]`` on.

    Returns:
        Number of words before the one that has it, and of one bits in them; int64.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401
        counts = sums = _counts(context, builder, signature.args[0], args[:2])
        none = ir.Constant(counts.type, None)
        for distance in (1, 2, 4):  # sums up to each word
            lanes = [8 + n - distance if n >= distance else n for n in range(8)]
            sums = builder.add(sums, _lanes(builder, none, sums, lanes))
        rank = _splat(builder, builder.trunc(args[2], ir.IntType(16)), counts.type)
        full = builder.icmp_unsigned("<=", sums, rank)
        number = builder.ctpop(builder.bitcast(full, ir.IntType(8)))
        found = builder.zext(number, ir.IntType(64))
        before = builder.sub(sums, counts)  # the sums before each word
        at = builder.and_(number, ir.IntType(8)(7))
        passed = builder.extract_element(before, builder.zext(at, ir.IntType(32)))
        both = found, builder.zext(passed, ir.IntType(64))
        return context.make_tuple(builder, signature.return_type, both)

    return _Pair(types.int64, 2)(words, types.int64, types.int64), generate


@_instruction
def full_of_blocks(typing_context: Any, before: Any, at: Any, rank: Any) -> Any:  # noqa: ANN401, ARG001
    """Return how many of seven uint16 behind ``before[at]`` are at most a rank: int64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401
        lanes = ir.VectorType(ir.IntType(16), 8)
        sums = builder.load(_address(context, builder, signature.args[0], args[:2], lanes), align=1)
        rank = _splat(builder, builder.trunc(args[2], ir.IntType(16)), lanes)
        full = builder.bitcast(builder.icmp_unsigned("<=", sums, rank), ir.IntType(8))
        number = builder.ctpop(builder.lshr(full, ir.IntType(8)(1)))
        return builder.zext(number, ir.IntType(64))

    return types.int64(before, types.int64, types.int64), generate


def _counts(context: Any, builder: Any, kind: Any, place: Any) -> Any:  # noqa: ANN401
    """Return the numbers of one bits in eight words, as eight 16-bit lanes."""
    words = ir.VectorType(ir.IntType(WORD), 8)
    some = builder.load(_address(context, builder, kind, place, words), align=1)
    count = builder.module.declare_intrinsic(
        "llvm.ctpop.v8i64", fnty=ir.FunctionType(words, [words])
    )
    return builder.trunc(builder.call(count, [some]), ir.VectorType(ir.IntType(16), 8))


def _address(context: Any, builder: Any, kind: Any, place: Any, pointed: Any) -> Any:  # noqa: ANN401
    """Return the address of an element of an array, as that of something else."""
    array, at = place
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), pointed.as_pointer())


def _lanes(builder: Any, one: Any, other: Any, numbers: Any) -> Any:  # noqa: ANN401
    """Return some lanes of two vectors, numbered from the first lane of the one on."""
    chosen = ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), numbers)
    return builder.shuffle_vector(one, other, chosen)


def _splat(builder: Any, value: Any, lanes: Any) -> Any:  # noqa: ANN401
    none = ir.Constant(lanes, ir.Undefined)
    one = builder.insert_element(none, value, ir.IntType(32)(0))
    return _lanes(builder, one, none, [0] * lanes.count)
