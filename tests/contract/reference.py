"""Reference kernels in plain numpy, which define the results of all others.

Arrays are flat; *bits* are unsigned integers of the element's width. Functions with a name ending
in ``_`` write into their first argument.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deltachain.kernels import arrays
from deltachain.types import BITS_DTYPES, Bits, Indices, StateDigest

CHUNK: Final = 1 << 16
"""Elements hashed at a time, so that temporaries stay in cache."""


def diff_(snapshot: Bits, current: Bits) -> arrays.Changes:
    """Find the elements of ``current`` whose bits differ from ``snapshot``, and copy them there."""
    indices = np.flatnonzero(snapshot != current)
    changed = arrays.Changes(indices, snapshot[indices], current[indices])
    snapshot[indices] = changed.new
    return changed


def cast_bf16(master: npt.NDArray[np.float32]) -> Bits:
    """Cast fp32 to bf16 bits: round to nearest even; a NaN becomes quiet and keeps its sign."""
    bits = np.asarray(master).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, quiet, rounded).astype(np.uint16)


def cast_diff_(snapshot: Bits, master: npt.NDArray[np.float32]) -> arrays.Changes:
    """Run :func:`diff_` on ``cast_bf16(master)``."""
    return diff_(snapshot, cast_bf16(master))


def mix(key: int, indices: npt.NDArray[Any], bits: Bits) -> npt.NDArray[np.uint64]:
    """Compute the contribution of each element to one lane of the state digest."""
    x = (np.uint64(key) + indices.astype(np.uint64) * np.uint64(arrays.PHI)) ^ bits.astype(
        np.uint64
    )
    x *= np.uint64(arrays.MIX_A)
    x ^= x >> np.uint64(32)
    x *= np.uint64(arrays.MIX_B)
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


def split_steps(steps: Bits) -> arrays.SplitSteps:
    """Split wrapping steps into sign, magnitude and exceptions (FORMAT.md 4)."""
    negative = (steps >> np.array(8 * steps.itemsize - 1, steps.dtype)).astype(np.bool_)
    magnitudes = np.where(negative, -steps, steps)
    exception = magnitudes != 1
    beyond = magnitudes[exception]
    magnitude = np.minimum(beyond, np.array(255, steps.dtype)).astype(np.uint8)
    return arrays.SplitSteps(negative, exception, magnitude, steps[exception][magnitude == 255])


def join_steps(split: arrays.SplitSteps) -> Bits:
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


def join_planes(planes: Sequence[npt.NDArray[np.uint8]], out: Bits) -> None:
    """Join ``(n,)`` byte planes, lowest byte first, into the ``(n,)`` elements of ``out``."""
    out[:] = 0
    for k, plane in enumerate(planes):
        out |= plane.astype(out.dtype) << out.dtype.type(8 * k)


def decode_steps(
    segments: npt.NDArray[np.int64], streams: arrays.StepStreams
) -> tuple[Indices, Bits]:
    """Decode the segments of one tensor in the encoding ``step``.

    Args:
        segments: ``(n, 6)``: start, length, nnz, gaps, exceptions and wide of each segment.

    Returns:
        ``(nnz,)`` flat int64 indices, strictly increasing inside the segments, and ``(nnz,)``
        wrapping steps, none of them zero.
    """
    found = [np.empty(0, np.int64)], [streams.wide[:0]]
    g = n = e = w = 0
    for start, length, nnz, gaps, exceptions, wide in segments.tolist():
        mine = streams.gaps[g : g + gaps]
        offsets = decode_gaps(mine)
        if offsets.size != nnz or offsets[-1] >= length or mine[-1] == np.iinfo(mine.dtype).max:
            raise ValueError(arrays.LEAVES)
        split = arrays.SplitSteps(
            _bits(streams.sign, streams.sign_at + n, nnz),
            _bits(streams.exception, streams.exception_at + n, nnz),
            streams.magnitude[e : e + exceptions],
            streams.wide[w : w + wide],
        )
        if not _is_canonical(split):
            raise ValueError(arrays.CANONICAL)
        found[0].append(offsets + start)
        found[1].append(join_steps(split))
        g, n, e, w = g + gaps, n + nnz, e + exceptions, w + wide
    return np.concatenate(found[0]), np.concatenate(found[1])


def _bits(packed: npt.NDArray[np.uint8], first: int, count: int) -> npt.NDArray[np.bool_]:
    """Unpack ``count`` bits from bit ``first`` on, the lowest of a byte first."""
    data = packed[first // 8 : (first + count + 7) // 8]
    bits = np.unpackbits(data, bitorder="little")[first % 8 :][:count]
    return bits.astype(np.bool_)


def _is_canonical(split: arrays.SplitSteps) -> bool:
    """Return whether the counts of steps are right, and their form is canonical."""
    escaped = split.magnitude == 255
    counts = int(np.count_nonzero(split.exception)), int(np.count_nonzero(escaped))
    if counts != (split.magnitude.size, split.wide.size) or bool(np.any(split.magnitude < 2)):
        return False
    negative = split.negative[split.exception]
    if split.wide.itemsize == 1:  # larger magnitudes belong to the other sign
        return not bool(np.any(split.magnitude > negative + np.uint8(127)))
    again = split_steps(split.wide)
    if again.magnitude.size != split.wide.size or bool(np.any(again.magnitude != 255)):
        return False
    return np.array_equal(again.negative, negative[escaped])


def copy_plane_(out: npt.NDArray[np.uint8], bits: Bits, k: int) -> None:
    """Write byte ``k`` of every element, 0 for the lowest; both arrays have shape ``(n,)``."""
    out[:] = np.ascontiguousarray(bits).view(np.uint8)[k :: bits.itemsize]


def rescale_(words: npt.NDArray[Any], steps: npt.NDArray[Any], one: int, large: int) -> None:
    """Add to the exponents of ``(n,)`` floats; subtract from those larger than ``large``.

    All are signed words of the floats' width; ``one`` is added to zeros as well.
    """
    magnitude = words & np.iinfo(words.dtype).max
    words += np.where(magnitude > large, -steps, steps)
    words += np.where(magnitude == 0, one, 0).astype(words.dtype)


def gather(weights: Bits, indices: Indices) -> Bits:
    """Return the bits at ``indices``."""
    return weights[indices]


def exchange_(one: Bits, other: Bits, done: Indices, end: int) -> None:
    """Exchange the elements of two ``(n,)`` arrays between positions ``done[0]`` and ``end``.

    ``done[0]`` becomes ``end``. Compiled kernels do all of it in one call, without exceptions.
    """
    between = slice(*sorted((int(done[0]), end)))
    one[between], other[between] = other[between].copy(), one[between].copy()
    done[0] = end


def scatter_(weights: Bits, indices: Indices, bits: Bits) -> None:
    """Write ``bits`` at ``indices``."""
    weights[indices] = bits


def stage_changes(
    indices: Indices, steps: Bits, box: arrays.WindowPlace, weights: Bits, key: tuple[int, int]
) -> arrays.StagedSteps:
    """Stage decoded steps of the elements of a box."""
    rest, positions = indices - box.offset, np.full(indices.size, box.at)
    inside = rest >= 0
    for size, there, live in box.dims.tolist():
        coordinate = rest // there
        rest = rest - coordinate * there
        inside &= coordinate < size
        positions = positions + coordinate * live
    inside &= rest == 0
    indices, positions = indices[inside], positions[inside]
    old = weights[positions]
    new = old + steps[inside]
    added, removed = digest_at(key, indices, new), digest_at(key, indices, old)
    return arrays.StagedSteps(positions, old, new, added, removed)
