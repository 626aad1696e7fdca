"""Codes of quantised weights on the host; numba only.

The results are those of the libraries that define the recipes, bit for bit
(``tests/unit/publish/test_host_codes.py``). Weights are bf16, or fp32 masters that are cast on the
way (FORMAT.md 4, Casts). Each loop keeps a weight in registers from its bits to its code.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from deltachain.kernels.compiling import compiled, inlined
from deltachain.kernels.jit import BLOCK, drive, emit, emit_rest
from deltachain.kernels.quantised import KINDS, Rounding, WindowBlocks
from deltachain.kernels.reference import Changes

# A loop that keeps both in registers is one that LLVM vectorises whole; views of arrays would have
# to be written and read again. Sums of 32 bits are cast back at once, since numba widens them.


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


# Rows are taken in bands, each whole rows of blocks that stay in the cache: the largest magnitudes
# of the band's blocks are found, each gives its factor by a table, and then its weights are cast,
# quantised, compared with the codes of the snapshot and compacted, a block of the diff at a time.
# Neither a cast copy nor a copy of the codes is made.


TILE: Final = 8192
"""Codes made at a time: they stay in the first cache."""

BAND: Final = 1 << 16
"""Weights of a band, unless a row of blocks has more: as fp32 they fit in the second cache."""


class BlockFactors(NamedTuple):
    """Factors of a window's blocks, by their largest magnitudes.

    Attributes:
        amax: bf16 bits of the largest magnitude of each block, ``(R, C)``: those of the weights
            raise them, unless they are known.
        table: Factor of a block by the bits of its largest magnitude, fp32 of shape ``(32768,)``; 0
            where such a block is refused.
        known: Whether ``amax`` is that of all weights already, and each has a factor.
    """

    amax: npt.NDArray[np.uint16]
    table: npt.NDArray[np.float32]
    known: bool


@compiled
def _fill(weights: Any, first: int, factors: Any, place: Any, out: Any) -> None:  # noqa: ANN401
    """Make the codes of consecutive weights, of any number of rows and blocks."""
    (amax, table, _), (at, size, kind) = factors, place
    columns, count = weights.shape[1], out.shape[0]
    row, column = first // columns, first % columns
    one, left = (column + at[1]) // size[1], size[1] - (column + at[1]) % size[1]
    line, done = (row + at[0]) // size[0], 0
    while done < count:
        run = min(count - done, columns - column, left)
        factor = table[amax[line, one]]
        fill_codes(weights[row, column : column + run], factor, out[done : done + run], kind)
        done += run
        column += run
        one, left = one + 1, size[1]
        if column == columns:
            row, column = row + 1, 0
            line = (row + at[0]) // size[0]
            one, left = at[1] // size[1], size[1] - at[1] % size[1]


@compiled
def _raise(weights: Any, low: int, high: int, factors: Any, place: Any) -> bool:  # noqa: ANN401
    """Raise the largest magnitudes of the blocks of a band; return whether all have a factor."""
    (amax, table, _), (at, size, _) = factors, place
    first = (low + at[0]) // size[0]
    part = amax[first : (high - 1 + at[0]) // size[0] + 1]
    raise_amax(weights[low:high], (low + at[0] - first * size[0], at[1]), size, part)
    for row in range(part.shape[0]):
        for column in range(part.shape[1]):
            if table[part[row, column]] == np.float32(0.0):
                return False
    return True


@compiled
def _diff(
    snapshot: Any,  # noqa: ANN401
    weights: Any,  # noqa: ANN401
    factors: Any,  # noqa: ANN401
    place: Any,  # noqa: ANN401
    start: int,
    out: Any,  # noqa: ANN401
) -> tuple[int, int]:
    """Diff from ``start`` while there is room for a block; return the end, or -1, and a count."""
    codes, mask = np.empty(TILE, np.uint8), np.empty(BLOCK, np.uint8)
    scratch = mask, mask.view(np.uint64), np.empty(BLOCK // 8 + 1, np.int64)
    at, size, _ = place
    (rows, columns), room = weights.shape, out[0].shape[0] - BLOCK
    height = size[0] * max(1, BAND // (size[0] * columns))
    here, count = start, 0
    while here < rows * columns and count <= room:
        band = (here // columns + at[0]) // height
        low, high = max(0, band * height - at[0]), min(rows, (band + 1) * height - at[0])
        # A band that was interrupted has its magnitudes.
        is_new = not factors[2] and here == low * columns
        if is_new and not _raise(weights, low, high, factors, place):
            return -1, count
        stop = high * columns
        while here < stop and count <= room:
            tile = codes[: min(TILE, stop - here)]
            _fill(weights, here, factors, place, tile)
            done = 0
            while done + BLOCK <= tile.shape[0] and count <= room:
                part = snapshot[here : here + BLOCK]
                count = emit(tile[done : done + BLOCK], part, here, out, scratch, count)
                done, here = done + BLOCK, here + BLOCK
            if done + BLOCK > tile.shape[0] and count <= room:
                rest = tile[done:]
                count = emit_rest(rest, snapshot[here : here + rest.shape[0]], here, out, count)
                here += rest.shape[0]
    return here, count


def codes_diff_(
    snapshot: npt.NDArray[np.uint8],
    weights: WeightBits,
    factors: BlockFactors,
    blocks: WindowBlocks,
    rounding: Rounding,
) -> tuple[Changes, bool]:
    """Find the codes of weights that differ from ``snapshot``, and copy them there.

    Args:
        snapshot: Flat bits of ``(N * K,)`` codes.
        weights: Bits of ``(N, K)`` weights.
        factors: Factors of the blocks; their magnitudes are raised.
        blocks: Where the blocks are.
        rounding: How a weight and its factor make a code.

    Returns:
        The changes, and whether every block has a factor; otherwise there are no changes, and the
        snapshot is as it was.
    """
    given, place = tuple(factors), (*blocks, KINDS[rounding])

    def run(start: int, out: Any) -> tuple[int, int]:  # noqa: ANN401
        ended: tuple[int, int] = _diff(snapshot, weights, given, place, start, out)
        return ended

    return drive(run, snapshot)
