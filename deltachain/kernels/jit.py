"""The kernels of :mod:`.reference` as numba loops: one core, no GIL, cached on disk.

Slices instead of offsets make index expressions provably non-negative; otherwise numba adds a
wraparound test to each access, which prevents vectorisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deltachain.kernels.compiling import compiled, inlined
from deltachain.kernels.reading import (
    decode_gaps,
    decode_steps,
    digest,
    digest_at,
    exchange_,
    gather,
    join_planes,
    scatter_,
    stage_steps,
)
from deltachain.kernels.reference import Changes, SplitSteps
from deltachain.types import BITS_DTYPES, Bits, Indices

_U = np.uint64

# A block is compared to one byte an element, which LLVM vectorises; eight such bytes are read as
# one word, and only non-zero words are examined. What differs is copied to the snapshot, and
# appended.

BLOCK: Final = 512
"""Elements compared at a time, few enough for a fully unrolled comparison with short memory stalls:
at 1.2 % density, 256 and 1024 were a fifth slower (2026-11, AMD EPYC)."""

_LOWEST_BYTE: Final = _U(sum(j << (56 - 8 * j) for j in range(8)))
"""Multiplier: ``(lowest set bit of a word of 0/1 bytes) * this >> 56`` is the byte's number."""


@inlined
def emit(current: Any, snapshot: Any, at: int, out: Any, scratch: Any, count: int) -> int:
    """Compare one block, copy changes to the snapshot, and append them to ``out``."""
    indices, old, new = out
    mask, words, dirty = scratch
    for i in range(BLOCK):
        mask[i] = current[i] != snapshot[i]
    d = 0
    for w in range(BLOCK // 8):
        dirty[d] = w
        d += words[w] != _U(0)
    for q in range(d):
        word, first = words[dirty[q]], _U(8 * dirty[q])
        while word != _U(0):
            lowest = word & (~word + _U(1))
            i = first + ((lowest * _LOWEST_BYTE) >> _U(56))
            indices[count] = at + i
            new[count] = current[i]
            old[count] = snapshot[i]
            snapshot[i] = current[i]
            count += 1
            word ^= lowest
    return count


@compiled
def emit_rest(current: Any, snapshot: Any, at: int, out: Any, count: int) -> int:
    """Run :func:`emit` on fewer elements than a block."""
    indices, old, new = out
    for i in range(snapshot.shape[0]):
        if current[i] != snapshot[i]:
            indices[count] = at + i
            new[count] = current[i]
            old[count] = snapshot[i]
            snapshot[i] = current[i]
            count += 1
    return count


def drive(kernel: Callable[[int, Any], tuple[int, int]], snapshot: Bits) -> tuple[Changes, bool]:
    """Run a diff kernel to the end in buffers of bounded size; join the changes.

    Unwritten memory is never committed, so each buffer has room for a density of 3 %.
    """
    found: list[Changes] = []
    size = max(4 * BLOCK, snapshot.size // 32)
    at, dtype = 0, snapshot.dtype
    while not found or 0 <= at < snapshot.size:
        indices, old, new = np.empty(size, np.int64), np.empty(size, dtype), np.empty(size, dtype)
        at, count = kernel(at, (indices, old, new))
        found.append(Changes(indices[:count], old[:count], new[:count]))
    if at < 0:
        for changes in found:
            snapshot[changes.indices] = changes.old
        indices, old, new = found[0]
        return Changes(indices[:0], old[:0], new[:0]), False
    if len(found) == 1:
        return found[0], True
    return Changes(*(np.concatenate(column) for column in zip(*found, strict=True))), True


__all__ = [
    "cast_bf16",
    "cast_diff_",
    "decode_gaps",
    "decode_steps",
    "diff_",
    "digest",
    "digest_at",
    "encode_gaps",
    "exchange_",
    "gather",
    "join_planes",
    "scatter_",
    "split_steps",
    "stage_steps",
]

NAME: Final = "numba"


@compiled
def _diff(snapshot: Any, current: Any, start: int, out: Any) -> tuple[int, int]:
    """Diff from ``start`` while ``out`` has room for a block; return the end and the count."""
    mask = np.empty(BLOCK, np.uint8)
    scratch = mask, mask.view(np.uint64), np.empty(BLOCK // 8 + 1, np.int64)
    end, room = snapshot.shape[0], out[0].shape[0] - BLOCK
    at, count = start, 0
    while at + BLOCK <= end and count <= room:
        count = emit(current[at : at + BLOCK], snapshot[at : at + BLOCK], at, out, scratch, count)
        at += BLOCK
    if at + BLOCK > end and count <= room:
        count = emit_rest(current[at:], snapshot[at:], at, out, count)
        at = end
    return at, count


@compiled
def _cast(master: Any, out: Any) -> None:
    """Cast one block of fp32 bits to bf16 bits: round to nearest even, NaN stays quiet NaN."""
    for i in range(master.shape[0]):
        b = master[i]
        r = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        is_nan = (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out[i] = np.uint16(((b >> np.uint32(16)) | np.uint32(0x40)) if is_nan else r)


@compiled
def _cast_diff(snapshot: Any, master: Any, start: int, out: Any) -> tuple[int, int]:
    """Run :func:`_diff` on fp32 bits, cast a block at a time, without a full bf16 copy."""
    mask = np.empty(BLOCK, np.uint8)
    scratch = mask, mask.view(np.uint64), np.empty(BLOCK // 8 + 1, np.int64)
    block = np.empty(BLOCK, np.uint16)
    end, room = snapshot.shape[0], out[0].shape[0] - BLOCK
    at, count = start, 0
    while at + BLOCK <= end and count <= room:
        _cast(master[at : at + BLOCK], block)
        count = emit(block, snapshot[at : at + BLOCK], at, out, scratch, count)
        at += BLOCK
    if at + BLOCK > end and count <= room:
        _cast(master[at:], block)
        count = emit_rest(block, snapshot[at:], at, out, count)
        at = end
    return at, count


def _drive(
    kernel: Callable[..., tuple[int, int]], snapshot: Bits, current: npt.NDArray[Any]
) -> Changes:
    return drive(lambda at, out: kernel(snapshot, current, at, out), snapshot)[0]


def diff_(snapshot: Bits, current: Bits) -> Changes:
    return _drive(_diff, snapshot, current)


def cast_diff_(snapshot: Bits, master: npt.NDArray[np.float32]) -> Changes:
    return _drive(_cast_diff, snapshot, master.view(np.uint32))


def cast_bf16(master: npt.NDArray[np.float32]) -> Bits:
    out = np.empty(master.size, np.uint16)
    _cast(master.view(np.uint32), out)
    return out


@compiled
def _count_gaps(offsets: Any, limit: int) -> int:
    count: int = offsets.shape[0]
    previous = -1
    for i in range(offsets.shape[0]):
        count += (offsets[i] - previous - 1) // limit
        previous = offsets[i]
    return count


@compiled
def _fill_gaps(offsets: Any, limit: int, out: Any) -> None:
    at, previous = 0, -1
    for i in range(offsets.shape[0]):
        gap = offsets[i] - previous - 1
        while gap >= limit:
            out[at] = limit
            at += 1
            gap -= limit
        out[at] = gap
        at += 1
        previous = offsets[i]


def encode_gaps(offsets: Indices, width: int) -> Bits:
    limit = (1 << 8 * width) - 1
    out = np.empty(_count_gaps(offsets, limit), BITS_DTYPES[width])
    _fill_gaps(offsets, limit, out)
    return out


@compiled
def _split(steps: Any, top: Any, out: Any) -> tuple[int, int]:
    negative, exception, magnitude, wide = out
    exceptions, wides = 0, 0
    below = top - _U(1)
    for i in range(steps.shape[0]):
        step = _U(steps[i])
        is_negative = step >= top
        size = (top + below) - step + _U(1) if is_negative else step
        is_exception = size != _U(1)
        negative[i] = is_negative
        exception[i] = is_exception
        magnitude[exceptions] = min(size, _U(255))
        wide[wides] = steps[i]
        exceptions += 1 if is_exception else 0
        wides += 1 if size >= _U(255) else 0
    return exceptions, wides


def split_steps(steps: Bits) -> SplitSteps:
    n = steps.size
    negative, exception = np.empty(n, np.bool_), np.empty(n, np.bool_)
    magnitude, wide = np.empty(n + 1, np.uint8), np.empty(n + 1, steps.dtype)
    top = _U(1 << (8 * steps.itemsize - 1))
    exceptions, wides = _split(steps, top, (negative, exception, magnitude, wide))
    return SplitSteps(negative, exception, magnitude[:exceptions], wide[:wides])


@compiled
def _copy_plane(out: Any, bits: Any, shift: Any) -> None:
    for i in range(out.shape[0]):
        out[i] = np.uint8(bits[i] >> shift)


def copy_plane_(out: npt.NDArray[np.uint8], bits: Bits, k: int) -> None:
    """Write byte ``k`` of ``(n,)`` elements: 2.8 times as fast as a strided copy (2 bytes)."""
    _copy_plane(out, bits, bits.dtype.type(8 * k))
