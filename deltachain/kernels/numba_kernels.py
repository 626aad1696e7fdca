"""Kernels of the host as numba loops: one core, no GIL, cached on disk.

Slices instead of offsets make index expressions provably non-negative; otherwise numba adds a
wraparound test to each access, which prevents vectorisation.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numba
import numpy as np
import numpy.typing as npt
from numba.extending import intrinsic

from deltachain import threads as slab
from deltachain.kernels import arrays
from deltachain.kernels.compiling import compiled, inlined
from deltachain.types import BITS_DTYPES, Bits, Indices, StateDigest

if TYPE_CHECKING:
    from deltachain.kernels.segments import PlacementTable, SegmentBatch

_intrinsic: Final[Any] = intrinsic  # untyped
_carray: Final[Any] = numba.carray  # type: ignore[attr-defined]  # of the public interface
_U = np.uint64
_PHI, _MIX_A, _MIX_B = _U(arrays.PHI), _U(arrays.MIX_A), _U(arrays.MIX_B)


@compiled
def _mix(x: Any) -> Any:
    x *= _MIX_A
    x ^= x >> _U(32)
    x *= _MIX_B
    return x ^ (x >> _U(29))


@compiled
def _digest(key0: Any, key1: Any, bits: Any, start: Any) -> tuple[Any, Any]:
    lane0, lane1 = _U(0), _U(0)
    position = start * _PHI
    for i in range(bits.shape[0]):
        p = position + _U(i) * _PHI
        lane0 += _mix((key0 + p) ^ _U(bits[i]))
        lane1 += _mix((key1 + p) ^ _U(bits[i]))
    return lane0, lane1


@compiled
def _digest_at(key0: Any, key1: Any, indices: Any, bits: Any) -> tuple[Any, Any]:
    lane0, lane1 = _U(0), _U(0)
    for i in range(bits.shape[0]):
        p = _U(indices[i]) * _PHI
        lane0 += _mix((key0 + p) ^ _U(bits[i]))
        lane1 += _mix((key1 + p) ^ _U(bits[i]))
    return lane0, lane1


def digest(key: tuple[int, int], bits: Bits, start: int = 0) -> StateDigest:
    lane0, lane1 = _digest(_U(key[0]), _U(key[1]), bits, _U(start))
    return StateDigest(int(lane0), int(lane1))


def digest_at(key: tuple[int, int], indices: Indices, bits: Bits) -> StateDigest:
    lane0, lane1 = _digest_at(_U(key[0]), _U(key[1]), indices, bits)
    return StateDigest(int(lane0), int(lane1))


@compiled
def _decode_gaps(gaps: Any, limit: int, out: Any) -> int:
    count = 0
    at = np.int64(-1)
    for i in range(gaps.shape[0]):
        gap = np.int64(gaps[i])
        names_one = gap != limit
        at += gap + names_one
        out[count] = at
        count += names_one
    return count


def decode_gaps(gaps: Bits) -> Indices:
    """Decode gaps to offsets of the changes from the segment's start."""
    out = np.empty(gaps.size + 1, np.int64)
    count = _decode_gaps(gaps, np.iinfo(gaps.dtype).max, out)
    return out[:count]


@compiled
def _offsets(gaps: Any, start: Any, length: Any, out: Any) -> bool:
    """Decode the gaps of one segment to flat indices; return whether they keep the rules."""
    nnz, limit = out.shape[0], gaps.dtype.type(-1)
    named = 0
    for i in range(gaps.shape[0]):
        named += gaps[i] != limit
    if named != nnz or gaps[gaps.shape[0] - 1] == limit:
        return False
    count, at = 0, start - 1
    for i in range(gaps.shape[0]):
        names_one = gaps[i] != limit
        at += np.int64(gaps[i]) + names_one
        out[count] = at
        count += names_one
    return bool(at < start + length)


@compiled
def _bit(packed: Any, at: Any) -> Any:
    return (packed[at >> _U(3)] >> np.uint8(at & _U(7))) & np.uint8(1)


@compiled
def _is_wide(step: Any, negative: Any) -> bool:
    """Return whether a step with this sign bit has a magnitude of 255 or more."""
    kind, shift = step.dtype.type, 8 * step.itemsize - 1
    size = kind(kind(0) - step[0]) if negative else step[0]  # wraps in the width, not in 64 bits
    return bool((step[0] >> kind(shift)) == negative and size >= kind(255))


@compiled
def _steps(bits: Any, firsts: Any, magnitude: Any, wide: Any, out: Any) -> bool:
    """Join the steps of one segment; return whether they are canonical and their counts right."""
    kind, narrow = out.dtype.type, out.itemsize == 1
    e, w = 0, 0
    for i in range(out.shape[0]):
        negative = _bit(bits[0], firsts[0] + _U(i))
        if not _bit(bits[1], firsts[1] + _U(i)):
            out[i] = kind(0) - kind(1) if negative else kind(1)
            continue
        if e == magnitude.shape[0]:
            return False
        size = magnitude[e]
        e += 1
        if size < 2 or (narrow and size > np.uint8(127) + negative):
            return False
        if size < 255:
            out[i] = kind(0) - kind(size) if negative else kind(size)
            continue
        if w == wide.shape[0] or not _is_wide(wide[w : w + 1], negative):
            return False
        out[i] = wide[w]
        w += 1
    return bool(e == magnitude.shape[0] and w == wide.shape[0])


@compiled
def _decode_steps(segments: Any, streams: Any, firsts: Any, indices: Any, values: Any) -> int:
    """Decode all segments; return 0, or 1 for gaps and 2 for steps against the rules."""
    gaps, sign, exception, magnitude, wide = streams
    g, n, e, w = 0, 0, 0, 0
    for s in range(segments.shape[0]):
        start, length, nnz, gap_count, exceptions, wides = segments[s]
        mine = slice(n, n + nnz)
        if not _offsets(gaps[g : g + gap_count], start, length, indices[mine]):
            return 1
        at = firsts[0] + _U(n), firsts[1] + _U(n)
        short, long = magnitude[e : e + exceptions], wide[w : w + wides]
        if not _steps((sign, exception), at, short, long, values[mine]):
            return 2
        g, n, e, w = g + gap_count, n + nnz, e + exceptions, w + wides
    return 0


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
    nnz = int(segments[:, 2].sum())
    indices, values = slab.empty(nnz, np.int64), slab.empty(nnz, streams.wide.dtype)
    firsts = _U(streams.sign_at), _U(streams.exception_at)
    given = streams.gaps, streams.sign, streams.exception, streams.magnitude, streams.wide
    wrong = _decode_steps(segments, given, firsts, indices, values)
    if wrong:
        raise ValueError((arrays.LEAVES, arrays.CANONICAL)[wrong - 1])
    return indices, values


@compiled
def locate(indices: Any, steps: Any, box: Any, positions: Any) -> int:
    """Keep the indices and steps of the elements of a box, with their positions; count them."""
    offset, at, dims = box
    count = 0
    if dims.shape[0] == 1 and dims[0, 1] == dims[0, 2] == 1:  # a whole tensor, or a run of it
        numel = dims[0, 0]
        for i in range(indices.shape[0]):
            rest = indices[i] - offset
            indices[count], steps[count], positions[count] = indices[i], steps[i], at + rest
            count += (rest >= 0) & (rest < numel)
        return count
    for i in range(indices.shape[0]):
        rest, position = indices[i] - offset, at
        inside = rest >= 0
        for d in range(dims.shape[0]):
            coordinate = rest
            if dims[d, 1] != 1:
                coordinate = rest // dims[d, 1]
            rest -= coordinate * dims[d, 1]
            inside &= coordinate < dims[d, 0]
            position += coordinate * dims[d, 2]
        indices[count], steps[count], positions[count] = indices[i], steps[i], position
        count += inside & (rest == 0)
    return count


@compiled
def move(weights: Any, indices: Any, steps: Any, keys: Any, out: Any, lanes: Any) -> None:
    """Gather old bits and compute new ones; add both to the lanes of their digests."""
    positions, old, new = out
    for i in range(positions.shape[0]):  # by itself, so that many loads are under way at once
        old[i] = weights[positions[i]]
    added0, added1, removed0, removed1 = _U(0), _U(0), _U(0), _U(0)
    for i in range(positions.shape[0]):
        new[i] = old[i] + steps[i]
        at = _U(indices[i]) * _PHI
        added0 += _mix((keys[0] + at) ^ _U(new[i]))
        added1 += _mix((keys[1] + at) ^ _U(new[i]))
        removed0 += _mix((keys[0] + at) ^ _U(old[i]))
        removed1 += _mix((keys[1] + at) ^ _U(old[i]))
    lanes[0] += added0
    lanes[1] += added1
    lanes[2] += removed0
    lanes[3] += removed1


def _released(array: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """Return the first elements, without the memory of the others if those are the most."""
    return array[:count].copy() if 2 * count < array.size else array[:count]


def run_stage(
    run: Callable[..., int],
    segments: npt.NDArray[np.int64],
    scratch: tuple[Any, ...],
    live: tuple[arrays.WindowPlace, Bits, tuple[int, int]],
    broken: Sequence[str],
) -> arrays.StagedSteps:
    (offset, at, dims), weights, (key0, key1) = live
    nnz, kind = int(segments[:, 2].sum()), weights.dtype
    kept = np.empty(nnz, np.int64), np.empty(nnz, kind), np.empty(nnz, kind)
    lanes = np.zeros(4, np.uint64)
    count = run(((offset, at, dims), weights, (_U(key0), _U(key1)), lanes), (*scratch, *kept))
    if count < 0:
        raise ValueError(broken[-count - 1])
    added0, added1, removed0, removed1 = lanes.tolist()
    positions, old, new = (_released(array, count) for array in kept)
    return arrays.StagedSteps(
        positions=positions,
        old=old,
        new=new,
        added=StateDigest(added0, added1),
        removed=StateDigest(removed0, removed1),
    )


@compiled
def _join2(low: Any, high: Any, out: Any) -> None:
    for i in range(out.shape[0]):
        out[i] = np.uint16(low[i]) | (np.uint16(high[i]) << np.uint16(8))


@compiled
def _join4(planes: Any, out: Any) -> None:
    a, b, c, d = planes
    for i in range(out.shape[0]):
        low = np.uint32(a[i]) | (np.uint32(b[i]) << np.uint32(8))
        out[i] = low | (np.uint32(c[i]) << np.uint32(16)) | (np.uint32(d[i]) << np.uint32(24))


def join_planes(planes: Sequence[npt.NDArray[np.uint8]], out: Bits) -> None:
    """Join ``(n,)`` byte planes, lowest byte first, into the ``(n,)`` elements of ``out``."""
    if out.itemsize == 2:
        _join2(planes[0], planes[1], out)
    elif out.itemsize == 4:
        _join4(tuple(planes), out)
    else:
        for k, plane in enumerate(planes):
            out.view(np.uint8)[k :: out.itemsize] = plane


@compiled
def _gather(weights: Any, indices: Any, out: Any) -> None:
    for i in range(indices.shape[0]):
        out[i] = weights[indices[i]]


def gather(weights: Bits, indices: Indices) -> Bits:
    out = np.empty(indices.size, weights.dtype)
    _gather(weights, indices, out)
    return out


@compiled
def exchange_(one: Bits, other: Bits, done: Indices, end: int) -> None:
    """Exchange the elements of two ``(n,)`` arrays between positions ``done[0]`` and ``end``.

    ``done[0]`` becomes ``end``. Compiled kernels do all of it in one call, without exceptions.
    """
    first, last = min(done[0], end), max(done[0], end)
    mine, yours = one[first:last], other[first:last]
    for i in range(mine.shape[0]):
        bits = mine[i]
        mine[i] = yours[i]
        yours[i] = bits
    done[0] = end


@compiled
def scatter_(weights: Bits, indices: Indices, bits: Bits) -> None:
    for i in range(indices.shape[0]):
        weights[indices[i]] = bits[i]


@compiled
def expand_blocks(first: Any, counts: Any, offsets: Any, out: Any) -> None:
    """Write the index of each change: block ``b`` has ``counts[b]`` of the offsets."""
    at = 0
    for block in range(first.shape[0]):
        for _ in range(counts[block]):
            out[at] = first[block] + offsets[at]
            at += 1


@compiled
def exchange_blocks_(bits: Any, blocks: Any, offsets: Any, new: Any, old: Any, done: Any) -> None:
    """Write the new bits of changes, given as in :func:`expand_blocks`; keep the old ones.

    ``done[0]`` counts such calls: compiled kernels do all of it in one call, without exceptions.
    """
    first, counts = blocks
    at = 0
    for block in range(first.shape[0]):
        for _ in range(counts[block]):
            place = first[block] + offsets[at]
            old[at] = bits[place]
            bits[place] = new[at]
            at += 1
    done[0] += 1


@_intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return numba.types.voidptr(address), generate


@compiled
def _weights(address: Any, kind: Any) -> Any:
    """Return live bits at an address as an array, of which only positions inside are used."""
    return _carray(_pointer(address), (1 << 48,), kind)


@compiled
def _join(buffer: Any, offsets: Any, first: Any, out: Any) -> None:
    """Join elements of as many planes as they have bytes, from element ``first`` on."""
    n = out.shape[0]
    if out.itemsize == 2:
        low, high = offsets[0] + first, offsets[1] + first
        _join2(buffer[low : low + n], buffer[high : high + n], out)
        return
    out[:] = 0
    for k in range(out.itemsize):
        at = offsets[k] + first
        plane, shift = buffer[at : at + n], out.dtype.type(8 * k)
        for i in range(n):
            out[i] |= out.dtype.type(plane[i]) << shift


@compiled
def _decode_segment(row: Any, then: Any, given: Any, room: Any) -> int:
    """Decode a segment into the room; return 0, or as :func:`_decode_steps`."""
    buffer, offsets, gap, absolute = given
    indices, values, gaps, wide = room
    _, start, length, n, g, e, w, bit = row
    if gap == 1:
        at = offsets[0]
        fits = _offsets(buffer[at + g : at + then[4]], start, length, indices)
    else:
        _join(buffer, offsets, g, gaps)
        fits = _offsets(gaps, start, length, indices)
    if not fits:
        return 1
    planes = offsets[gap + 3 :]
    if absolute:
        _join(buffer, planes, n, values)
        return 0
    _join(buffer, planes, w, wide)
    bits = buffer[offsets[gap] : offsets[gap + 1]], buffer[offsets[gap + 1] : offsets[gap + 2]]
    magnitude = buffer[offsets[gap + 2] + e : offsets[gap + 2] + then[5]]
    return 0 if _steps(bits, (_U(bit), _U(bit)), magnitude, wide, values) else 2


@compiled
def _box(row: Any) -> Any:
    """Return the box of a placement, without the dimensions that the table fills up."""
    dims = row[6:].reshape(-1, 3)
    used = dims.shape[0]
    while used and dims[used - 1, 0] == 1 and dims[used - 1, 2] == 0:
        used -= 1
    return row[0], row[1], dims[:used]


@compiled
def _stage_batch(table: Any, given: Any, places: Any, room: Any, out: Any) -> tuple[int, int]:
    """Stage all segments; return the numbers of blocks and elements, or a segment and -1 or -2."""
    rows, first = places
    positions, old, new, blocks, sums = out
    count, block = 0, 0
    for s in range(table.shape[0] - 1):
        row, then = table[s], table[s + 1]
        tensor, nnz = row[0], then[3] - row[3]
        mine = room[0][:nnz], room[1][:nnz]
        into = mine[0], mine[1], room[2][: then[4] - row[4]], room[3][: then[6] - row[6]]
        wrong = _decode_segment(row, then, given, into)
        if wrong:
            return s, -wrong
        last = first[tensor + 1] - 1
        for p in range(first[tensor], last + 1):
            indices, values = mine
            if p < last:  # the next placement needs them too
                indices, values = room[4][:nnz], room[5][:nnz]
                indices[:] = mine[0]
                values[:] = mine[1]
            held = locate(indices, values, _box(rows[p]), positions[count : count + nnz])
            if not held:
                continue
            here, weights = slice(count, count + held), _weights(rows[p, 5], values.dtype)
            place = positions[here]
            if given[3]:
                for i in range(held):
                    values[i] -= weights[place[i]]
            keys = _U(rows[p, 3]), _U(rows[p, 4])
            lanes = sums[rows[p, 2]]
            move(weights, indices, values, keys, (place, old[here], new[here]), lanes)
            lanes[4] += _U(held)
            blocks[block, 0], blocks[block, 1], blocks[block, 2] = p, count, held
            block += 1
            count += held
    return block, count


def stage_batch(batch: "SegmentBatch", places: "PlacementTable") -> arrays.StagedBatch:
    """Decode and stage all segments of a batch; see the reference.

    A segment's indices and steps stay in cache: only what is kept is written to memory.
    """
    kind, table = BITS_DTYPES[batch.layout.width], batch.table
    widths = np.diff(table, axis=0)
    several = np.diff(places.first)[table[:-1, 0]]
    most, gaps, wide = (int(widths[:, n].max(initial=0)) for n in (3, 4, 6))
    spare = most if int(several.max(initial=0)) > 1 else 0
    room = (
        *(np.empty(most, np.int64), np.empty(most, kind), np.empty(gaps, np.uint16)),
        *(np.empty(wide, kind), np.empty(spare, np.int64), np.empty(spare, kind)),
    )
    nnz = int((widths[:, 3] * several).sum())
    kept = slab.empty(nnz, np.int64), slab.empty(nnz, kind), slab.empty(nnz, kind)
    blocks = np.empty((int(several.sum()), 3), np.int64)
    sums = np.zeros((places.slots, 5), np.uint64)
    given = batch.buffer, np.array(batch.offsets, np.int64), batch.layout.gap, batch.layout.absolute
    rows = places.rows.numpy(), places.first
    number, count = _stage_batch(table, given, rows, room, (*kept, blocks, sums))
    if count < 0:
        raise arrays.BrokenSegmentError(number, (arrays.LEAVES, arrays.CANONICAL)[-count - 1])
    blocks = blocks[:number]
    positions, old, new = (_released(array, count) for array in kept)
    return arrays.StagedBatch(positions, old, new, blocks, sums)


@compiled
def _write_batch(rows: Any, blocks: Any, positions: Any, bits: Any) -> None:
    for b in range(blocks.shape[0]):
        place, first, count = blocks[b]
        scatter_(
            _weights(rows[place, 5], bits.dtype),
            positions[first : first + count],
            bits[first : first + count],
        )


def write_batch_(places: "PlacementTable", staged: arrays.StagedBatch, bits: Bits) -> None:
    _write_batch(places.rows.numpy(), staged.blocks, staged.positions, bits)


# A block is compared to one byte an element, which LLVM vectorises; eight such bytes are read as
# one word, and only non-zero words are examined. What differs is copied to the snapshot, and
# appended.

BLOCK: Final = 512
"""Elements compared at a time, few enough for a fully unrolled comparison with short memory stalls:
at 1.2 % density, 256 and 1024 were a fifth slower (2026-11, AMD EPYC)."""

SMALLEST: Final = 4 * BLOCK  # elements of the smallest buffer of changes

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


def _drive(
    kernel: Callable[..., tuple[int, int]], snapshot: Bits, current: npt.NDArray[Any]
) -> arrays.Changes:
    """Run a diff kernel to the end in buffers of bounded size; join the changes.

    Unwritten memory is never committed, so each buffer has room for a density of 3 %.
    """
    found: list[arrays.Changes] = []
    size = max(SMALLEST, snapshot.size // 32)
    at, dtype = 0, snapshot.dtype
    while not found or at < snapshot.size:
        indices, old, new = np.empty(size, np.int64), np.empty(size, dtype), np.empty(size, dtype)
        at, count = kernel(snapshot, current, at, (indices, old, new))
        indices, old, new = indices[:count], old[:count], new[:count]
        if size == SMALLEST:  # thousands of small tensors would hold a buffer each
            indices, old, new = indices.copy(), old.copy(), new.copy()
        found.append(arrays.Changes(indices, old, new))
    if len(found) == 1:
        return found[0]
    return arrays.Changes(*(np.concatenate(column) for column in zip(*found, strict=True)))


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


def diff_(snapshot: Bits, current: Bits) -> arrays.Changes:
    """Find the elements of ``current`` whose bits differ from ``snapshot``, and copy them there."""
    return _drive(_diff, snapshot, current)


def cast_diff_(snapshot: Bits, master: npt.NDArray[np.float32]) -> arrays.Changes:
    """Run :func:`diff_` on ``cast_bf16(master)``."""
    return _drive(_cast_diff, snapshot, master.view(np.uint32))


def cast_bf16(master: npt.NDArray[np.float32]) -> Bits:
    """Cast fp32 to bf16 bits: round to nearest even; a NaN becomes quiet and keeps its sign."""
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
    """Encode the distances between changes of one segment as unsigned integers.

    An entry below the maximum skips that many unchanged elements and marks the next one as changed;
    the maximum skips that many elements and marks none.

    Args:
        offsets: Strictly increasing offsets from the segment's start, shape ``(nnz,)``.
    """
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


def split_steps(steps: Bits) -> arrays.SplitSteps:
    """Split wrapping steps into sign, magnitude and exceptions (FORMAT.md 4)."""
    n = steps.size
    negative, exception = np.empty(n, np.bool_), np.empty(n, np.bool_)
    magnitude, wide = np.empty(n + 1, np.uint8), np.empty(n + 1, steps.dtype)
    top = _U(1 << (8 * steps.itemsize - 1))
    exceptions, wides = _split(steps, top, (negative, exception, magnitude, wide))
    return arrays.SplitSteps(negative, exception, magnitude[:exceptions], wide[:wides])


@compiled
def _copy_plane(out: Any, bits: Any, shift: Any) -> None:
    for i in range(out.shape[0]):
        out[i] = np.uint8(bits[i] >> shift)


def copy_plane_(out: npt.NDArray[np.uint8], bits: Bits, k: int) -> None:
    """Write byte ``k`` of ``(n,)`` elements: 2.8 times as fast as a strided copy (2 bytes)."""
    _copy_plane(out, bits, bits.dtype.type(8 * k))


@compiled
def _rescale(words: Any, steps: Any, most: Any, one: Any, large: Any) -> None:
    kind = words.dtype.type  # a wider type in between would not be vectorised
    for i in range(words.shape[0]):
        magnitude = kind(words[i] & most)
        step = kind(-steps[i]) if magnitude > large else steps[i]
        more = one if magnitude == kind(0) else kind(0)
        words[i] = kind(kind(words[i] + step) + more)


def rescale_(words: npt.NDArray[Any], steps: npt.NDArray[Any], one: int, large: int) -> None:
    """Add to the exponents of ``(n,)`` floats; subtract from those larger than ``large``.

    All are signed words of the floats' width; ``one`` is added to zeros as well.
    """
    kind = words.dtype.type
    _rescale(words, steps[: words.size], kind(np.iinfo(kind).max), kind(one), kind(large))
