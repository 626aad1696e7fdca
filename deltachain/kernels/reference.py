"""Reference kernels in plain numpy, which define the results of all others.

Arrays are flat; *bits* are unsigned integers of the element's width. Functions with a name ending
in ``_`` write into their first argument.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from deltachain.types import BITS_DTYPES, Bits, Indices, StateDigest

PHI: Final = 0x9E3779B97F4A7C15
"""Odd multiplier of the element's position (2**64 divided by the golden ratio)."""
MIX_A: Final = 0xD6E8FEB86659FD93
MIX_B: Final = 0xA0761D6478BD642F
"""Odd multipliers of the finaliser."""
CHUNK: Final = 1 << 16
"""Elements hashed at a time, so that temporaries stay in cache."""


class Changes(NamedTuple):
    """Changed elements as three ``(nnz,)`` arrays: flat int64 indices, old bits and new bits."""

    indices: Indices
    old: Bits
    new: Bits


class SplitSteps(NamedTuple):
    """Wrapping steps, split into arrays that compress well.

    Attributes:
        negative: Top bit of each step, ``(nnz,)`` bool.
        exception: Whether the magnitude of each step is not 1, ``(nnz,)`` bool.
        magnitude: Magnitude of each exception, 255 for 255 or more, ``(exceptions,)`` uint8.
        wide: The whole step for each magnitude of 255, ``(wide,)`` bits.
    """

    negative: npt.NDArray[np.bool_]
    exception: npt.NDArray[np.bool_]
    magnitude: npt.NDArray[np.uint8]
    wide: Bits


def diff_(snapshot: Bits, current: Bits) -> Changes:
    """Find the elements of ``current`` whose bits differ from ``snapshot``, and copy them there."""
    indices = np.flatnonzero(snapshot != current)
    changed = Changes(indices, snapshot[indices], current[indices])
    snapshot[indices] = changed.new
    return changed


def cast_bf16(master: npt.NDArray[np.float32]) -> Bits:
    """Cast fp32 to bf16 bits: round to nearest even; a NaN becomes quiet and keeps its sign."""
    bits = np.asarray(master).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, quiet, rounded).astype(np.uint16)


def cast_diff_(snapshot: Bits, master: npt.NDArray[np.float32]) -> Changes:
    """Run :func:`diff_` on ``cast_bf16(master)``."""
    return diff_(snapshot, cast_bf16(master))


def mix(key: int, indices: npt.NDArray[Any], bits: Bits) -> npt.NDArray[np.uint64]:
    """Compute the contribution of each element to one lane of the state digest."""
    x = (np.uint64(key) + indices.astype(np.uint64) * np.uint64(PHI)) ^ bits.astype(np.uint64)
    x *= np.uint64(MIX_A)
    x ^= x >> np.uint64(32)
    x *= np.uint64(MIX_B)
    return x ^ (x >> np.uint64(29))


def digest_at(key: tuple[int, int], indices: Indices, bits: Bits) -> StateDigest:
    """Sum the contributions of the elements at ``indices`` to the state digest."""
    lane0 = int(mix(key[0], indices, bits).sum(dtype=np.uint64))
    lane1 = int(mix(key[1], indices, bits).sum(dtype=np.uint64))
    return StateDigest(lane0, lane1)


def digest(key: tuple[int, int], bits: Bits, start: int = 0) -> StateDigest:
    """Sum the contributions of consecutive elements, the first at flat index ``start``."""
    total = StateDigest()
    for at in range(0, bits.size, CHUNK):
        window = bits[at : at + CHUNK]
        total += digest_at(key, np.arange(start + at, start + at + window.size), window)
    return total


def encode_gaps(offsets: Indices, width: int) -> Bits:
    """Encode the distances between changes of one segment as unsigned integers.

    An entry below the maximum skips that many unchanged elements and marks the next one as changed;
    the maximum skips that many elements and marks none.

    Args:
        offsets: Strictly increasing offsets from the segment's start, shape ``(nnz,)``.
        width: Size of an entry in bytes, 1 or 2.
    """
    limit = (1 << 8 * width) - 1
    gap = np.diff(offsets, prepend=-1) - 1
    escapes = gap // limit
    ends = np.cumsum(escapes + 1)
    out = np.full(int(ends[-1]) if gap.size else 0, limit, BITS_DTYPES[width])
    out[ends - 1] = gap - escapes * limit
    return out


def decode_gaps(gaps: Bits) -> Indices:
    """Decode gaps to offsets of the changes from the segment's start."""
    limit = np.iinfo(gaps.dtype).max
    escape = gaps == limit
    advance = np.cumsum(gaps.astype(np.int64) + ~escape)
    offsets: Indices = advance[~escape] - 1
    return offsets


def split_steps(steps: Bits) -> SplitSteps:
    """Split wrapping steps into sign, magnitude and exceptions (FORMAT.md 4)."""
    negative = (steps >> np.array(8 * steps.itemsize - 1, steps.dtype)).astype(np.bool_)
    magnitudes = np.where(negative, -steps, steps)
    exception = magnitudes != 1
    beyond = magnitudes[exception]
    magnitude = np.minimum(beyond, np.array(255, steps.dtype)).astype(np.uint8)
    return SplitSteps(negative, exception, magnitude, steps[exception][magnitude == 255])


def join_steps(split: SplitSteps) -> Bits:
    """Join steps split by :func:`split_steps`."""
    dtype = split.wide.dtype
    beyond = split.magnitude.astype(dtype)
    negative = split.negative[split.exception]
    beyond = np.where(negative, -beyond, beyond)
    beyond[split.magnitude == 255] = split.wide
    one = np.array(1, dtype)
    steps = np.where(split.negative, -one, one)
    steps[split.exception] = beyond
    return steps


def copy_plane_(out: npt.NDArray[np.uint8], bits: Bits, k: int) -> None:
    """Write byte ``k`` of every element, 0 for the lowest; both arrays have shape ``(n,)``."""
    out[:] = np.ascontiguousarray(bits).view(np.uint8)[k :: bits.itemsize]


def gather(weights: Bits, indices: Indices) -> Bits:
    """Return the bits at ``indices``."""
    return weights[indices]


def scatter_(weights: Bits, indices: Indices, bits: Bits) -> None:
    """Write ``bits`` at ``indices``."""
    weights[indices] = bits
