"""Triton programs of :mod:`.staging`: decode one segment; stage or write one block of changes.

Contents of streams are untrusted: every access is masked by bounds from the tables, and what is
derived from contents is compared with them first. Tables are int64; pointers to bits have the
integer type of the element's width.
"""

from typing import Final

import triton
import triton.language as tl

from deltachain.kernels.arrays import MIX_A, MIX_B, PHI
from deltachain.kernels.segments import Column, Field, Reason
from deltachain.kernels.torch_kernels import signed

_PHI = tl.constexpr(signed(PHI))
_MIX_A = tl.constexpr(signed(MIX_A))
_MIX_B = tl.constexpr(signed(MIX_B))
_COLUMNS = tl.constexpr(len(Column))
_START = tl.constexpr(int(Column.START))
_LENGTH = tl.constexpr(int(Column.LENGTH))
_FIRST = tl.constexpr(int(Column.FIRST))
_GAP = tl.constexpr(int(Column.GAP))
_EXCEPTION = tl.constexpr(int(Column.EXCEPTION))
_WIDE = tl.constexpr(int(Column.WIDE))
_BIT = tl.constexpr(int(Column.BIT))
_OFFSET = tl.constexpr(int(Field.OFFSET))
_AT = tl.constexpr(int(Field.AT))
_SLOT = tl.constexpr(int(Field.SLOT))
_KEY0 = tl.constexpr(int(Field.KEY0))
_KEY1 = tl.constexpr(int(Field.KEY1))
_ADDRESS = tl.constexpr(int(Field.ADDRESS))
_DIMS = tl.constexpr(int(Field.DIMS))
_BAD_WIDE_STEP = tl.constexpr(int(Reason.WIDE_STEP))
_BAD_WIDES = tl.constexpr(int(Reason.WIDES))
_BAD_MAGNITUDE = tl.constexpr(int(Reason.MAGNITUDE))
_BAD_EXCEPTIONS = tl.constexpr(int(Reason.EXCEPTIONS))
_BAD_LENGTH = tl.constexpr(int(Reason.LENGTH))
_BAD_LAST_GAP = tl.constexpr(int(Reason.LAST_GAP))
_BAD_GAPS = tl.constexpr(int(Reason.GAPS))

OFFSETS: Final = (
    "gap",
    "gap_at",
    "gap_stride",
    "sign_at",
    "exception_at",
    "magnitude_at",
    "plane_at",
    "plane_stride",
)
"""Arguments that differ from batch to batch: nothing is compiled anew for their values."""


@triton.jit
def _count(row, COLUMN: tl.constexpr):
    """Return how many entries of a segment a column counts."""
    return (tl.load(row + _COLUMNS + COLUMN) - tl.load(row + COLUMN)).to(tl.int32)


@triton.jit
def _join(buffer, at, stride, mask, WIDTH: tl.constexpr):
    """Join byte planes into int64; 0 where masked."""
    joined = tl.load(buffer + at, mask=mask, other=0).to(tl.int64)
    for k in tl.static_range(1, WIDTH):
        plane = tl.load(buffer + at + k * stride.to(tl.int64), mask=mask, other=0)
        joined |= plane.to(tl.int64) << (8 * k)
    return joined


@triton.jit
def _gaps(buffer, at, stride, mask, gap):
    """Join gap entries of one byte, or of two that lie in planes; 0 where masked."""
    low = tl.load(buffer + at, mask=mask, other=0).to(tl.int32)
    two = mask & (tl.zeros_like(low) + gap == 2)
    return low | (tl.load(buffer + at + stride, mask=two, other=0).to(tl.int32) << 8)


@triton.jit
def _offsets(buffer, row, indices, gap, gap_at, gap_stride, BLOCK: tl.constexpr):
    """Decode the gaps of a segment to indices; return the reason to refuse it."""
    largest = tl.where(gap == 2, 0xFFFF, 0xFF)
    start, length = tl.load(row + _START), tl.load(row + _LENGTH)
    out = indices + tl.load(row + _FIRST)
    at = gap_at + tl.load(row + _GAP)
    nnz, gaps = _count(row, _FIRST), _count(row, _GAP)
    passed = length - length
    found = nnz - nnz
    for begin in range(0, gaps, BLOCK):
        lane = begin + tl.arange(0, BLOCK)
        mask = lane < gaps
        entry = _gaps(buffer, at + lane, gap_stride, mask, gap)
        given = (mask & (entry != largest)).to(tl.int32)
        advance = entry + given
        offset = passed + tl.cumsum(advance, 0) - 1
        rank = found + tl.cumsum(given, 0) - 1
        fits = (given != 0) & (rank < nnz)
        tl.store(out + rank, start + tl.minimum(offset, length - 1), mask=fits)
        passed += tl.sum(advance, 0)
        found += tl.sum(given, 0)
    for begin in range(found, nnz, BLOCK):
        lane = begin + tl.arange(0, BLOCK)
        tl.store(out + lane, tl.zeros([BLOCK], tl.int64) + start, mask=lane < nnz)
    one = tl.arange(0, 1)
    last = tl.max(_gaps(buffer, at + gaps - 1 + one, gap_stride, one == 0, gap), 0)
    reason = tl.where(passed > length, _BAD_LENGTH, 0)
    reason = tl.where(last == largest, _BAD_LAST_GAP, reason)
    return tl.where(found != nnz, _BAD_GAPS, reason)


@triton.jit
def _absolute(
    buffer, row, values, plane_at, plane_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Join the new bits of a segment."""
    first, nnz = tl.load(row + _FIRST), _count(row, _FIRST)
    for begin in range(0, nnz, BLOCK):
        lane = begin + tl.arange(0, BLOCK)
        mask = lane < nnz
        bits = _join(buffer, plane_at + first + lane, plane_stride, mask, WIDTH)
        tl.store(values + first + lane, bits.to(values.dtype.element_ty), mask=mask)


@triton.jit
def _is_off(whole, negative, WIDTH: tl.constexpr):
    """Return whether wide steps have another sign than theirs, or a magnitude below 255."""
    top = (whole >> (8 * WIDTH - 1)) & 1
    magnitude = tl.where(negative != 0, -whole, whole)
    if WIDTH < 8:
        magnitude &= (1 << (8 * WIDTH)) - 1
    return (top != negative) | ((magnitude >= 0) & (magnitude < 255))


@triton.jit
def _steps(
    buffer,
    row,
    values,
    sign_at,
    exception_at,
    magnitude_at,
    plane_at,
    plane_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Join the steps of a segment; return the reason to refuse it."""
    first, bit0 = tl.load(row + _FIRST), tl.load(row + _BIT)
    magnitudes = buffer + magnitude_at + tl.load(row + _EXCEPTION)
    wide_at = plane_at + tl.load(row + _WIDE)
    nnz, exceptions, wides = _count(row, _FIRST), _count(row, _EXCEPTION), _count(row, _WIDE)
    excepted = nnz - nnz
    widened = nnz - nnz
    reason = nnz - nnz
    for begin in range(0, nnz, BLOCK):
        lane = begin + tl.arange(0, BLOCK)
        mask = lane < nnz
        byte, shift = (bit0 + lane) >> 3, ((bit0 + lane) & 7).to(tl.int32)
        signs = tl.load(buffer + sign_at + byte, mask=mask, other=0).to(tl.int32)
        flags = tl.load(buffer + exception_at + byte, mask=mask, other=0).to(tl.int32)
        negative = (signs >> shift) & 1
        exception = (flags >> shift) & 1
        exception = tl.where(mask, exception, 0)
        rank = excepted + tl.cumsum(exception, 0) - 1
        fits = (exception != 0) & (rank < exceptions)
        found = tl.load(magnitudes + rank, mask=fits, other=1).to(tl.int32)
        largest = 127 + negative if WIDTH == 1 else tl.full([BLOCK], 255, tl.int32)
        bad = fits & ((found < 2) | (found > largest))
        reason = tl.maximum(reason, tl.max(tl.where(bad, _BAD_MAGNITUDE, 0), 0))
        step = tl.where(negative != 0, -found, found).to(tl.int64)
        if WIDTH > 1:
            wide = (fits & (found == 255)).to(tl.int32)
            nth = widened + tl.cumsum(wide, 0) - 1
            within = (wide != 0) & (nth < wides)
            whole = _join(buffer, wide_at + nth, plane_stride, within, WIDTH)
            off = within & _is_off(whole, negative.to(tl.int64), WIDTH)
            reason = tl.maximum(reason, tl.max(tl.where(off, _BAD_WIDE_STEP, 0), 0))
            step = tl.where(within, whole, step)
            widened += tl.sum(wide, 0)
        tl.store(values + first + lane, step.to(values.dtype.element_ty), mask=mask)
        excepted += tl.sum(exception, 0)
    reason = tl.where(widened != wides, tl.maximum(reason, _BAD_WIDES), reason)
    return tl.where(excepted != exceptions, _BAD_EXCEPTIONS, reason)


@triton.jit(do_not_specialize=OFFSETS)
def decode_segment(
    buffer,
    rows,
    indices,
    values,
    verdict,
    gap,
    gap_at,
    gap_stride,
    sign_at,
    exception_at,
    magnitude_at,
    plane_at,
    plane_stride,
    WIDTH: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decode one segment, and say why it is malformed, if it is.

    ``gap`` is the number of bytes of a gap entry; ``*_at`` are offsets of streams in the buffer,
    strides those between planes.
    """
    segment = tl.program_id(0)
    row = rows + segment * _COLUMNS
    reason = _offsets(buffer, row, indices, gap, gap_at, gap_stride, BLOCK)
    if ABSOLUTE:
        _absolute(buffer, row, values, plane_at, plane_stride, WIDTH, BLOCK)
    else:
        why = _steps(
            buffer,
            row,
            values,
            sign_at,
            exception_at,
            magnitude_at,
            plane_at,
            plane_stride,
            WIDTH,
            BLOCK,
        )
        reason = tl.maximum(reason, why)
    tl.store(verdict + segment, reason)


@triton.jit
def _locate(index, row, mask, ndim):
    """Return which indices are in a placement, and their positions in its storage."""
    rest = index - tl.load(row + _OFFSET)
    inside = mask & (rest >= 0)
    position = tl.zeros_like(rest) + tl.load(row + _AT)
    for k in range(ndim):
        size = tl.load(row + _DIMS + 3 * k)
        there = tl.load(row + _DIMS + 3 * k + 1)
        live = tl.load(row + _DIMS + 3 * k + 2)
        coordinate = rest
        if there != 1:  # a division of 64 bits is many instructions
            coordinate = rest // there
        rest -= coordinate * there
        inside &= coordinate < size
        position += coordinate * live
    return inside & (rest == 0), position


@triton.jit
def _changes(blocks, indices, kept, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Load a block of changes: its placement, positions of the changes, their indices, a mask."""
    block = blocks + tl.program_id(0).to(tl.int64) * 3
    lane = tl.arange(0, BLOCK)
    change = tl.load(block + 1) + lane
    mask = lane < tl.load(block + 2)
    index = tl.load(indices + change, mask=mask, other=-1)
    if MASKED:
        mask &= tl.load(kept + change, mask=mask, other=0) != 0
    return tl.load(block), change, index, mask


@triton.jit(do_not_specialize=["ndim"])
def count_block(
    blocks,
    rows,
    indices,
    kept,
    counts,
    ndim,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the changes of one block that are in its placement."""
    placement, _, index, mask = _changes(blocks, indices, kept, MASKED, BLOCK)
    inside, _ = _locate(index, rows + placement * (_DIMS + 3 * ndim), mask, ndim)
    tl.store(counts + tl.program_id(0), tl.sum(inside.to(tl.int64), 0))


@triton.jit
def _mixed(key, position, bits, mask):
    """Mix elements into their contributions to one lane of the state digest."""
    x = (key + position) ^ bits
    x *= _MIX_A
    x = x ^ ((x >> 32) & 0xFFFFFFFF)
    x *= _MIX_B
    x = x ^ ((x >> 29) & 0x7FFFFFFFF)
    return tl.where(mask, x, 0)


@triton.jit
def _sum_lane(sums, key, position, bits, mask):
    """Add the contributions of elements to one lane of the state digest."""
    tl.atomic_add(sums, tl.sum(_mixed(key, position, bits, mask), 0), sem="relaxed")


@triton.jit
def extend(bits, WIDTH: tl.constexpr):
    """Extend bits with zeros to int64."""
    extended = bits.to(tl.int64)
    if WIDTH < 8:
        extended &= (1 << (8 * WIDTH)) - 1
    return extended


@triton.jit
def digest_blocks(
    head,
    bits,
    indices,
    WIDTH: tl.constexpr,
    AT: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Add elements to both lanes of a state digest, ``TURNS`` blocks a program.

    ``head``, int64 of shape ``(6,)``: the lanes, their keys, the number of elements, and the index
    of the first unless ``AT`` says that each has one in ``indices``.
    """
    key0, key1 = tl.load(head + 2), tl.load(head + 3)
    numel, start = tl.load(head + 4), tl.load(head + 5)
    lane = tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * (TURNS * BLOCK)
    sum0 = tl.zeros([BLOCK], tl.int64)
    sum1 = tl.zeros([BLOCK], tl.int64)
    for begin in range(first, tl.minimum(first + TURNS * BLOCK, numel), BLOCK):
        at = begin + lane
        mask = at < numel
        extended = extend(tl.load(bits + at, mask=mask, other=0), WIDTH)
        index = start + at
        if AT:
            index = tl.load(indices + at, mask=mask, other=0)
        scaled = index * _PHI
        sum0 += _mixed(key0, scaled, extended, mask)
        sum1 += _mixed(key1, scaled, extended, mask)
    tl.atomic_add(head, tl.sum(sum0, 0), sem="relaxed")
    tl.atomic_add(head + 1, tl.sum(sum1, 0), sem="relaxed")


@triton.jit(do_not_specialize=["ndim"])
def stage_block(
    blocks,
    rows,
    indices,
    kept,
    values,
    absolute,
    ends,
    positions,
    olds,
    news,
    sums,
    writes,
    ndim,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stage the changes of one block that are in its placement.

    ``ABSOLUTE`` is 0 for steps, 1 for new bits, 2 where the mask ``absolute`` says which.
    """
    placement, change, index, mask = _changes(blocks, indices, kept, MASKED, BLOCK)
    row = rows + placement * (_DIMS + 3 * ndim)
    inside, position = _locate(index, row, mask, ndim)
    live = tl.load(row + _ADDRESS).to(values.dtype)
    old = tl.load(live + position, mask=inside, other=0)
    new = tl.load(values + change, mask=inside, other=0)
    if ABSOLUTE == 0:
        new = (old + new).to(old.dtype)
    elif ABSOLUTE == 2:
        whole = tl.load(absolute + change, mask=inside, other=0) != 0
        new = tl.where(whole, new, (old + new).to(old.dtype))
    program = tl.program_id(0)
    end = tl.load(ends + program)
    count = tl.sum(inside.to(tl.int64), 0)
    out = end - count + tl.cumsum(inside.to(tl.int32), 0) - 1
    tl.store(positions + out, position, mask=inside)
    tl.store(olds + out, old, mask=inside)
    tl.store(news + out, new, mask=inside)
    write = writes + program.to(tl.int64) * 3
    tl.store(write, tl.load(row + _ADDRESS))
    tl.store(write + 1, end - count)
    tl.store(write + 2, count)
    sums += tl.load(row + _SLOT) * 5
    scaled = index * _PHI
    key0, key1 = tl.load(row + _KEY0), tl.load(row + _KEY1)
    added, removed = extend(new, WIDTH), extend(old, WIDTH)
    _sum_lane(sums, key0, scaled, added, inside)
    _sum_lane(sums + 1, key1, scaled, added, inside)
    _sum_lane(sums + 2, key0, scaled, removed, inside)
    _sum_lane(sums + 3, key1, scaled, removed, inside)
    tl.atomic_add(sums + 4, count, sem="relaxed")


@triton.jit
def write_block(writes, positions, bits, BLOCK: tl.constexpr):
    """Write one staged block."""
    write = writes + tl.program_id(0).to(tl.int64) * 3
    live = tl.load(write).to(bits.dtype)
    first, count = tl.load(write + 1), tl.load(write + 2)
    lane = tl.arange(0, BLOCK)
    mask = lane < count
    position = tl.load(positions + first + lane, mask=mask, other=0)
    tl.store(live + position, tl.load(bits + first + lane, mask=mask, other=0), mask=mask)
