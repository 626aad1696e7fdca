"""Operations on words of 64 bits that numba has no function for, as LLVM instructions.

LLVM has each of them on every machine: where there is no such instruction it makes a few others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import binding, ir
from numba.core import config, types
from numba.extending import intrinsic

WORD: Final = 64
"""Bits of a word."""


def _has_deposit() -> bool:
    """Return whether kernels are compiled for processors that deposit bits in one step.

    The first ones of AMD that can took hundreds.
    """
    settings: Any = config  # untyped
    chosen = settings.CPU_FEATURES  # NUMBA_CPU_FEATURES, and none with NUMBA_CPU_NAME=generic
    if chosen is None:
        has = bool(binding.get_host_cpu_features().get("bmi2", False))
    else:
        has = "+bmi2" in chosen.split(",")
    name = settings.CPU_NAME or binding.get_host_cpu_name()
    return has and name not in ("bdver4", "znver1", "znver2")


HAS_DEPOSIT: Final = _has_deposit()
"""Whether :func:`deposit` may be used."""


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
def deposit(typing_context: Any, value: Any, mask: Any) -> Any:  # noqa: ANN401, ARG001
    """Put the low bits of a uint64 at the one bits of a mask; only if ``HAS_DEPOSIT``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401, ARG001
        word = ir.IntType(WORD)
        kind = ir.FunctionType(word, [word, word])
        pdep = builder.module.declare_intrinsic("llvm.x86.bmi.pdep.64", fnty=kind)
        return builder.call(pdep, args)

    return types.uint64(types.uint64, types.uint64), generate


@_instruction
def nonzero_words(typing_context: Any, words: Any, at: Any) -> Any:  # noqa: ANN401, ARG001
    """Return which of 64 uint64 from ``words[at]`` on are not zero, as bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401
        lanes = ir.VectorType(ir.IntType(WORD), WORD)
        some = builder.load(_address(context, builder, signature.args[0], args, lanes), align=1)
        there = builder.icmp_unsigned("!=", some, ir.Constant(lanes, None))
        return builder.bitcast(there, ir.IntType(WORD))

    return types.uint64(words, types.int64), generate


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
def prefetch(typing_context: Any, array: Any, at: Any) -> Any:  # noqa: ANN401, ARG001
    """Ask for the memory of ``array[at]``, which need not be there."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        ask = builder.module.declare_intrinsic("llvm.prefetch.p0", fnty=kind)
        place = _address(context, builder, signature.args[0], args, ir.IntType(8))
        builder.call(ask, [place, number(0), number(3), number(1)])  # to read, near, data
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


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
def run_mask(typing_context: Any, codes: Any, at: Any, run: Any) -> Any:  # noqa: ANN401, ARG001
    """Compare 64 bytes from ``codes[at]`` on; bit ``n`` is set if byte ``n`` is in a run.

    A run is its first value and the number of its others.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401
        lanes = ir.VectorType(ir.IntType(8), WORD)
        some = builder.load(_address(context, builder, signature.args[0], args[:2], lanes), align=1)
        low, more = (_splat(builder, builder.extract_value(args[2], n), lanes) for n in range(2))
        inside = builder.icmp_unsigned("<=", builder.sub(some, low), more)
        return builder.bitcast(inside, ir.IntType(WORD))

    return types.uint64(codes, types.int64, run), generate


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
def load_word(typing_context: Any, data: Any, at: Any) -> Any:  # noqa: ANN401, ARG001
    """Return the eight bytes from ``data[at]`` on, the lowest first, as a uint64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401
        place = _address(context, builder, signature.args[0], args, ir.IntType(WORD))
        return builder.load(place, align=1)

    return types.uint64(data, types.int64), generate


@_instruction
def count_before(typing_context: Any, words: Any, at: Any, sums: Any, to: Any) -> Any:  # noqa: ANN401, ARG001
    """Count the one bits of 64 uint64 from ``words[at]`` on.

    The number before each word is written from ``sums[to]`` on, as uint16. Returns that of all.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401
        words, sums = signature.args[0], signature.args[2]
        int64, lanes = ir.IntType(64), ir.VectorType(ir.IntType(16), WORD // 2)
        total = none = ir.Constant(lanes, None)
        for half in range(0, WORD, lanes.count):
            eights = []
            for word in range(half, half + lanes.count, 8):
                place = args[0], builder.add(args[1], int64(word))
                eights.append(_counts(context, builder, words, place))
            upto = counts = _joined(builder, eights)
            for distance in (1, 2, 4, 8, 16):  # sums up to each word
                moved = [max(lanes.count + n - distance, 0) for n in range(lanes.count)]
                upto = builder.add(upto, _lanes(builder, none, upto, moved))
            before = builder.add(builder.sub(upto, counts), total)
            to = builder.add(args[3], int64(half))
            builder.store(before, _address(context, builder, sums, (args[2], to), lanes), align=1)
            last = [lanes.count - 1] * lanes.count
            total = builder.add(total, _lanes(builder, upto, upto, last))
        return builder.zext(builder.extract_element(total, ir.IntType(32)(0)), int64)

    return types.int64(words, types.int64, sums, types.int64), generate


@_instruction
def count_up_to(typing_context: Any, sums: Any, at: Any, most: Any) -> Any:  # noqa: ANN401, ARG001
    """Return how many of 64 uint16 from ``sums[at]`` on are at most a number: int64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401
        lanes = ir.VectorType(ir.IntType(16), WORD)
        some = builder.load(_address(context, builder, signature.args[0], args[:2], lanes), align=1)
        most = _splat(builder, builder.trunc(args[2], ir.IntType(16)), lanes)
        within = builder.icmp_unsigned("<=", some, most)
        return builder.ctpop(builder.bitcast(within, ir.IntType(WORD)))

    return types.int64(sums, types.int64, types.int64), generate


def _counts(context: Any, builder: Any, kind: Any, place: Any) -> Any:  # noqa: ANN401
    """Return the numbers of one bits in eight words, as eight 16-bit lanes."""
    words = ir.VectorType(ir.IntType(WORD), 8)
    some = builder.load(_address(context, builder, kind, place, words), align=1)
    count = builder.module.declare_intrinsic(
        "llvm.ctpop.v8i64", fnty=ir.FunctionType(words, [words])
    )
    return builder.trunc(builder.call(count, [some]), ir.VectorType(ir.IntType(16), 8))


def _joined(builder: Any, some: list[Any]) -> Any:  # noqa: ANN401
    """Return the lanes of some vectors, one after the other; their number is a power of two."""
    while len(some) > 1:
        numbers = list(range(2 * some[0].type.count))
        pairs = zip(some[::2], some[1::2], strict=True)
        some = [_lanes(builder, one, other, numbers) for one, other in pairs]
    return some[0]


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
