"""What the batched decode and stage kernels promise, as checks that need numpy and torch alone."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltachain.delta import ABSOLUTE, STEP, TensorDelta, fold_all, new_bits
from deltachain.errors import MalformedError
from deltachain.kernels import staging
from deltachain.kernels.arrays import SplitSteps
from deltachain.kernels.segments import (
    MESSAGES,
    ChangeBatch,
    Column,
    LivePlacement,
    PlacementTable,
    Reason,
    SegmentBatch,
    StreamLayout,
    TensorStreams,
    effects,
    pack,
)
from deltachain.kernels.torch_kernels import INT_DTYPES
from deltachain.types import BITS_DTYPES, Bits, Indices, StateDigest, TensorSpec
from tests.contract import reference


@dataclass(frozen=True)
class Given:
    """The changed elements of one tensor: ascending indices, and steps or new bits."""

    tensor: int
    numel: int
    indices: Indices
    values: Bits


@dataclass
class Streams:
    segments: list[tuple[int, ...]] = field(default_factory=list)
    gaps: list[Bits] = field(default_factory=list)
    negative: list[Any] = field(default_factory=list)
    exception: list[Any] = field(default_factory=list)
    magnitude: list[Any] = field(default_factory=list)
    values: list[Bits] = field(default_factory=list)


def streams_of(given: Given, layout: StreamLayout, length: int, bit: int) -> TensorStreams:
    made = Streams()
    for number in np.unique(given.indices // length).tolist():
        start = number * length
        mine = (given.indices >= start) & (given.indices < start + length)
        values = given.values[mine]
        offsets = given.indices[mine] - start
        gaps = reference.encode_gaps(offsets, layout.gap)
        split = reference.split_steps(values)
        counts = (0, 0) if layout.absolute else (split.magnitude.size, split.wide.size)
        size = min(length, given.numel - start)
        made.segments.append((start, size, values.size, gaps.size, *counts))
        made.gaps.append(gaps)
        made.negative.append(split.negative)
        made.exception.append(split.exception)
        made.magnitude.append(split.magnitude)
        made.values.append(values if layout.absolute else split.wide)
    bits = not layout.absolute
    none = np.empty(0, np.uint8)
    return TensorStreams(
        tensor=given.tensor,
        numel=given.numel,
        segments=np.array(made.segments, np.int64).reshape(-1, 6),
        planes=_planes(_joined(made.values, BITS_DTYPES[layout.width]), layout.width),
        gaps=_planes(_joined(made.gaps, BITS_DTYPES[layout.gap]), layout.gap),
        sign=_bits(made.negative, bit) if bits else none,
        exception=_bits(made.exception, bit) if bits else none,
        magnitude=_joined(made.magnitude, np.dtype(np.uint8)) if bits else none,
        bit=bit if bits else 0,
    )


def batch_of(
    given: Sequence[Given], layout: StreamLayout, length: int = 1 << 20, first_bit: int = 3
) -> SegmentBatch:
    return pack(
        layout,
        [streams_of(g, layout, length, (first_bit + i) % 8) for i, g in enumerate(given)],
    )


def decoded(batch: SegmentBatch) -> tuple[Indices, Bits, Any]:
    dtype = BITS_DTYPES[batch.layout.width]
    indices = np.zeros(batch.totals.nnz, np.int64)
    values = np.zeros(batch.totals.nnz, dtype)
    verdict = np.zeros(len(batch.table) - 1, np.int32)
    for number, (row, following) in enumerate(zip(batch.table, batch.table[1:], strict=False)):
        out = slice(row[Column.FIRST], following[Column.FIRST])
        offsets, why = _offsets(batch, row, following)
        found, other = _values_segments(batch, row, following)
        verdict[number] = max(why, other)
        if not verdict[number]:
            indices[out] = offsets + row[Column.START]
            values[out] = found
    return indices, values, verdict


def _offsets(batch: SegmentBatch, row: Any, following: Any) -> tuple[Any, Reason]:
    nnz, gap = following[Column.FIRST] - row[Column.FIRST], batch.layout.gap
    entries = _from_planes(batch, range(gap), row, following, Column.GAP)
    offsets = reference.decode_gaps(entries)
    limit = np.iinfo(entries.dtype).max
    if offsets.size != nnz:
        return offsets, Reason.GAPS
    if entries[-1] == limit:
        return offsets, Reason.LAST_GAP
    return offsets, Reason.LENGTH if offsets[-1] >= row[Column.LENGTH] else Reason.NONE


def _values_segments(batch: SegmentBatch, row: Any, following: Any) -> tuple[Any, Reason]:
    layout, gap = batch.layout, batch.layout.gap
    planes = range(gap + 3, gap + 3 + layout.width)
    if layout.absolute:
        return _from_planes(batch, planes, row, following, Column.FIRST), Reason.NONE
    streams = _streams(batch)
    nnz = following[Column.FIRST] - row[Column.FIRST]
    bits = slice(row[Column.BIT], row[Column.BIT] + nnz)
    negative, exception = (
        np.unpackbits(streams[gap + k], bitorder="little")[bits].astype(np.bool_) for k in (0, 1)
    )
    magnitude = streams[gap + 2][row[Column.EXCEPTION] : following[Column.EXCEPTION]]
    wide = _from_planes(batch, planes, row, following, Column.WIDE)
    if magnitude.size != exception.sum():
        return wide, Reason.EXCEPTIONS
    largest = 255 if layout.width > 1 else 127 + negative[exception].astype(np.int64)
    if np.any((magnitude < 2) | (magnitude > largest)):
        return wide, Reason.MAGNITUDE
    escaped = (magnitude == 255) & (layout.width > 1)
    if escaped.sum() != wide.size:
        return wide, Reason.WIDES
    again = reference.split_steps(wide)
    full = again.magnitude.size == wide.size and bool((again.magnitude == 255).all())
    if not full or not np.array_equal(again.negative, negative[exception][escaped]):
        return wide, Reason.WIDE_STEP
    return reference.join_steps(SplitSteps(negative, exception, magnitude, wide)), Reason.NONE


def _from_planes(
    batch: SegmentBatch, numbers: Sequence[int], row: Any, following: Any, column: Column
) -> Bits:
    streams = _streams(batch)
    mine = [streams[k][row[column] : following[column]] for k in numbers]
    stacked = np.ascontiguousarray(np.stack(mine, axis=1))
    return stacked.view(BITS_DTYPES[len(mine)]).reshape(-1)


def _joined(arrays: list[Any], dtype: np.dtype[Any]) -> Any:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype)


def _planes(values: Bits, width: int) -> list[Any]:
    if not width:
        return []
    split = values.view(np.uint8).reshape(-1, width)
    return [np.ascontiguousarray(split[:, k]) for k in range(width)]


def _bits(flags: list[Any], bit: int) -> Any:
    packed = _joined(flags, np.dtype(np.bool_))
    # Bits of another tensor come before: ones, so that reading them shows.
    return np.packbits(np.concatenate([np.ones(bit, np.bool_), packed]), bitorder="little")


def _streams(batch: SegmentBatch) -> list[Any]:
    """Gap planes, ``sign``, ``exception``, ``magnitude`` and value planes."""
    return [batch.buffer[a:b] for a, b in pairwise(batch.offsets)]


LAYOUTS = [
    StreamLayout(width, gap, absolute)
    for width in BITS_DTYPES
    for gap, absolute in ((1, False), (2, False), (1, True), (2, True))
]
GUARD = 64
"""Elements before and after live bits that nothing may write."""


@dataclass(frozen=True)
class BatchArm:
    """The kernels on one device."""

    device: torch.device

    def decode(self, batch: SegmentBatch) -> ChangeBatch:
        return staging.decode(batch, staging.upload(batch, self.device))


def check_decode(arm: BatchArm) -> None:
    rng = np.random.default_rng(21)
    for layout in LAYOUTS:
        given = [_given(rng, t, n, d, layout) for t, (n, d) in enumerate(SHAPES)]
        for tensors in (given, given[:1], []):
            batch = batch_of(tensors, layout, length=2_600)
            found = arm.decode(batch)
            _same(found.indices, np.concatenate([_NO_INDEX, *(g.indices for g in tensors)]))
            _same(found.values, np.concatenate([_none(layout), *(g.values for g in tensors)]))
            assert not found.verdicts[0][1].any()


def check_refusals(arm: BatchArm) -> None:
    """Each rule of FORMAT.md 4 that is broken: a reason for its segment, indices in bounds."""
    seen = set()
    for batch in hostile():
        indices, values, verdict = decoded(batch)
        found = arm.decode(batch)
        reasons = found.verdicts[0][1].cpu().numpy()
        np.testing.assert_array_equal(reasons, verdict)
        seen |= set(verdict.tolist())
        _check_bounds(batch, found.indices)
        good = np.repeat(verdict == 0, np.diff(batch.table[:, 3]))
        np.testing.assert_array_equal(found.indices.cpu().numpy()[good], indices[good])
        _same(found.values.cpu()[torch.from_numpy(good)], values[good])
    assert seen == set(map(int, Reason)), seen


def check_verdict(arm: BatchArm) -> None:
    """A malformed batch is refused by tensor, segment and reason before anything is staged."""
    for batch in itertools.islice(hostile(), 0, None, 9):
        verdict = decoded(batch)[2]
        bad = np.flatnonzero(verdict)
        tensors = 1 + int(batch.table[:-1, 0].max())
        live = [_storage(arm, np.zeros(9, BITS_DTYPES[batch.layout.width])) for _ in range(tensors)]
        placements = [
            LivePlacement(t, 0, [(9, 1, 1)], one[GUARD:-GUARD]) for t, one in enumerate(live)
        ]
        keys = [(1, 2)] * tensors
        table = PlacementTable.build(placements, keys, arm.device)
        names = [f"tensor {t}" for t in range(tensors)]
        message = ""
        try:
            staging.stage(arm.decode(batch), table, names)
        except MalformedError as exc:
            message = str(exc)
        assert bool(message) == bool(bad.size)
        if bad.size:
            row, why = batch.table[bad[0]], MESSAGES[Reason(int(verdict[bad[0]]))]
            assert f"'tensor {row[0]}', segment at {row[1]}: {why}" in message
        assert all(_intact(one, 9) for one in live)


def check_stage(arm: BatchArm) -> None:
    rng = np.random.default_rng(22)
    for layout in LAYOUTS:
        if layout.gap == 2:
            continue  # decoded to the same
        numels = [_NUMEL, _NUMEL, 5, _NUMEL, 1]
        given = [_given(rng, t, n, 0.4, layout) for t, n in enumerate(numels)]
        scene = Scenery(arm, layout, PLACEMENTS, len(numels), rng)
        changes = arm.decode(batch_of(given, layout, length=500))
        scene.check(changes, [(g, bool(layout.absolute)) for g in given])


def check_far(arm: BatchArm) -> None:
    """Indices and positions beyond 2^31, as windows of a tensor of 2^40 elements."""
    rng = np.random.default_rng(23)
    far = (1 << 40) - 3_000_000
    for layout in LAYOUTS[:4]:
        begins = [0, (1 << 31) - 40, (1 << 32) - 40, far, (1 << 40) - 90]
        indices = np.concatenate([b + np.flatnonzero(rng.random(90) < 0.5) for b in begins])
        values = _values(rng, indices.size, layout)
        given = Given(0, 1 << 40, indices, values)
        dims = [(30, 3, 1)]
        placements = [(0, begin + 1, dims, at % 2) for at, begin in enumerate(begins)]
        scene = Scenery(arm, layout, placements, 1, rng)
        changes = arm.decode(batch_of([given], layout))
        scene.check(changes, [(given, bool(layout.absolute))])


def check_fold(arm: BatchArm) -> None:
    rng = np.random.default_rng(24)
    every = list(itertools.product((False, True), repeat=3))
    cases = [(2, kinds) for kinds in every] + [(w, kinds) for w in (1, 4, 8) for kinds in every[:3]]
    for width, kinds in cases:
        versions = []
        for absolute in kinds:
            layout = StreamLayout(width, 1, absolute)
            given = [_given(rng, t, 90, 0.5, layout) for t in (0, 2) if rng.random() < 0.9]
            versions.append((given, layout))
        versions.append((_opposite(versions[-1][0]), versions[-1][1]))
        together = [arm.decode(batch_of(g, layout, length=40)) for g, layout in versions]
        expected = [_folded(t, width, versions) for t in (0, 1, 2)]
        found = staging.fold([staging.fold(together[:2]), *together[2:]])
        placements = [(t, 3, [(80, 1, 1)], 0) for t in (0, 1, 2)]
        scene = Scenery(arm, versions[0][1], placements, 3, rng)
        scene.check(found, [one for one in expected if one])


def check_digest_keys(arm: BatchArm) -> None:
    """NaN payloads, -0.0 and the largest keys keep every bit."""
    bits = np.array([0x8000, 0x7FC1, 0xFFFF, 0x7F81, 0], np.uint16)
    layout = StreamLayout(2, 1, absolute=True)
    given = Given(0, 5, np.arange(5), bits[::-1].copy())
    live = torch.from_numpy(bits.view(np.int16).copy()).to(arm.device)
    key = (2**64 - 1, 2**63)
    table = PlacementTable.build([LivePlacement(0, 0, [(5, 1, 1)], live)], [key], arm.device)
    staged = staging.stage(arm.decode(batch_of([given], layout)), table, ["w"])
    (effect,) = effects(staged.sums)
    assert effect.added == reference.digest(key, given.values)
    assert effect.removed == reference.digest(key, bits)
    staging.write_(staged)
    _same(live, given.values)


BATCH_CHECKS: tuple[Callable[[BatchArm], None], ...] = (
    check_decode,
    check_refusals,
    check_verdict,
    check_stage,
    check_far,
    check_fold,
    check_digest_keys,
)

_NUMEL = 4 * 5 * 6 * 10
_NO_INDEX = np.empty(0, np.int64)
_Place = tuple[int, int, list[tuple[int, int, int]], int]


PLACEMENTS: list[_Place] = [
    (0, 0, [(_NUMEL, 1, 1)], 0),  # a whole tensor
    (1, 300, [(300, 1, 1)], 0),  # rows
    (1, 5, [(60, 20, 5), (5, 1, 1)], 2),  # columns
    (1, 5, [(60, 20, 11), (5, 1, 2)], 1),  # a copy of them, with others between
    (1, 301, [(2, 300, 60), (3, 60, 1), (4, 10, 3), (5, 2, 12)], 1),  # every second column
    (3, 7, [], 3),  # one element
    (3, 0, [(10, 120, 1)], 0),
]


class Scenery:
    def __init__(
        self,
        arm: BatchArm,
        layout: StreamLayout,
        placements: Sequence[_Place],
        tensors: int,
        rng: Any,
    ) -> None:
        dtype = BITS_DTYPES[layout.width]
        self.arm, self.placements, self.dtype = arm, placements, dtype
        self.keys = [tuple(rng.integers(0, 1 << 64, 2, np.uint64).tolist()) for _ in range(tensors)]
        self.bits = [rng.integers(0, 256, 3 + _extent(dims), dtype) for _, _, dims, _ in placements]
        self.live = [_storage(arm, one) for one in self.bits]
        rows = [
            LivePlacement(t, offset, dims, live[GUARD:-GUARD], 2, slot)
            for (t, offset, dims, slot), live in zip(placements, self.live, strict=True)
        ]
        self.table = PlacementTable.build(rows, self.keys, arm.device)

    def check(self, changes: ChangeBatch, given: Sequence[tuple[Given, Any]]) -> None:
        """Stage, write and undo."""
        staged = staging.stage(changes, self.table, ["w"] * len(self.keys))
        order = sorted(range(len(self.placements)), key=lambda at: self.placements[at][0])
        slots = [[StateDigest(), StateDigest(), 0] for _ in range(self.table.slots)]
        expected = [one.copy() for one in self.bits]
        wanted: list[list[Any]] = [[], [], []]
        for at, one, absolute in ((a, g, m) for g, m in given for a in order):
            if one.tensor == self.placements[at][0]:
                _stage_one(self, at, (one, absolute), (wanted, slots, expected))
        _same(staged.positions, np.concatenate([_NO_INDEX, *wanted[0]]))
        _same(staged.old, np.concatenate([np.empty(0, self.dtype), *wanted[1]]))
        _same(staged.new, np.concatenate([np.empty(0, self.dtype), *wanted[2]]))
        assert [[e.added, e.removed, e.nnz] for e in effects(staged.sums)] == slots
        self._equal(self.bits)
        staging.write_(staged)
        self._equal(expected)
        staging.undo_(staged)
        self._equal(self.bits)

    def _equal(self, expected: Sequence[Bits]) -> None:
        for live, bits in zip(self.live, expected, strict=True):
            assert _intact(live, bits.size)
            _same(live[GUARD:-GUARD], bits)


def _stage_one(scene: Scenery, at: int, change: tuple[Given, Any], out: Any) -> None:
    (given, absolute), (wanted, slots, expected) = change, out
    tensor, offset, dims, slot = scene.placements[at]
    there, live = np.array([offset]), np.array([2])
    for size, stride, step in dims:
        there = np.add.outer(there, np.arange(size) * stride).ravel()
        live = np.add.outer(live, np.arange(size) * step).ravel()
    ascending = np.argsort(there)
    common, mine, found = np.intersect1d(given.indices, there[ascending], return_indices=True)
    positions = live[ascending][found]
    old = expected[at][positions]
    mask = np.broadcast_to(np.asarray(absolute), given.values.shape)[mine]
    new = new_bits(old, given.values[mine], mask)
    expected[at][positions] = new
    for column, array in zip(wanted, (positions, old, new), strict=True):
        column.append(array)
    slots[slot][0] += reference.digest_at(scene.keys[tensor], common, new)
    slots[slot][1] += reference.digest_at(scene.keys[tensor], common, old)
    slots[slot][2] += common.size


def hostile() -> Iterator[SegmentBatch]:
    """Batches that break each rule: bytes changed anywhere in a stream, and in its last entry."""
    rng = np.random.default_rng(25)
    for layout in LAYOUTS:
        if layout.width != 2 and (layout.absolute or layout.gap == 2):
            continue
        given = [_given(rng, t, n, 0.3, layout) for t, n in enumerate((40, 500))]
        batch = batch_of(given, layout, length=300)
        planes = [(begin, end) for begin, end in itertools.pairwise(batch.offsets) if begin < end]
        for begin, end in planes:
            for at in (begin, end - 1, int(rng.integers(begin, end))):
                value = int(rng.choice(np.array([0, 1, 255, rng.integers(256)])))
                yield _changed(batch, [at], value)
        far = Given(0, 1 << 20, np.array([0, 600_000]), np.full(2, 1, BITS_DTYPES[layout.width]))
        batch = batch_of([far], layout)
        ends = [batch.offsets[k + 1] for k in range(layout.gap)]
        escape = _changed(batch, [end - 1 for end in ends], 255)
        yield escape  # as many elements as before, less one
        yield _changed(escape, [end - 2 for end in ends], 1)  # as many, the last entry too large
        if layout == StreamLayout(8, 1, absolute=False):
            # Magnitude 254, and 255 with another sign.
            for value in (254, 1 << 63):
                wide = Given(0, 9, np.array([3]), np.array([300], np.uint64))
                batch = batch_of([wide], layout)
                ending = np.array([value], np.uint64).view(np.uint8)
                yield replace(batch, buffer=np.append(batch.buffer[:-8], ending))


def _changed(batch: SegmentBatch, places: Sequence[int], value: int) -> SegmentBatch:
    buffer = batch.buffer.copy()
    buffer[list(places)] = value
    return replace(batch, buffer=buffer)


SHAPES = ((900, 0.3), (1, 1.0), (40, 0.0), (2_400, 0.001), (3_000, 1.0), (7_000, 0.02))


def _given(rng: Any, tensor: int, numel: int, density: float, layout: StreamLayout) -> Given:
    indices = np.flatnonzero(rng.random(numel) < density)
    return Given(tensor, numel, indices, _values(rng, indices.size, layout))


def _values(rng: Any, count: int, layout: StreamLayout) -> Bits:
    dtype, top = BITS_DTYPES[layout.width], 1 << (8 * layout.width - 1)
    edges = [1, 2 * top - 1, 2, 254 % (2 * top), 255, top, top - 1, top + 1, 2 * top - 255]
    values = rng.choice(np.array([e or 1 for e in edges], dtype), count)
    chance = rng.integers(1, 2 * top - 1, count, np.uint64, endpoint=True).astype(dtype)
    mixed: Bits = np.where(rng.random(count) < 0.3, chance, values)
    return mixed


def _none(layout: StreamLayout) -> Bits:
    return np.empty(0, BITS_DTYPES[layout.width])


def _opposite(given: Sequence[Given]) -> list[Given]:
    return [Given(g.tensor, g.numel, g.indices[::2], -g.values[::2]) for g in given]


def _folded(tensor: int, width: int, versions: Any) -> tuple[Given, Any] | None:
    dtype = {1: "U8", 2: "BF16", 4: "F32", 8: "I64"}[width]
    spec = TensorSpec("w", dtype, (90,))
    deltas = [
        TensorDelta(
            spec=spec,
            indices=g.indices,
            values=g.values,
            absolute=ABSOLUTE if layout.absolute else STEP,
        )
        for given, layout in versions
        for g in given
        if g.tensor == tensor
    ]
    if not deltas:
        return None
    whole = fold_all(deltas)
    indices = np.arange(90) if whole.indices is None else whole.indices
    return Given(tensor, 90, indices, whole.values), whole.absolute


def _extent(dims: Sequence[tuple[int, int, int]]) -> int:
    return 1 + sum((size - 1) * live for size, _, live in dims)


def _storage(arm: BatchArm, bits: Bits) -> Tensor:
    guard = np.full(GUARD * bits.itemsize, 0x55, np.uint8).view(bits.dtype)
    whole = np.concatenate([guard, bits, guard])
    signed = whole if bits.itemsize == 1 else whole.view(f"<i{bits.itemsize}")
    return torch.from_numpy(signed).to(arm.device)


def _intact(live: Tensor, size: int) -> bool:
    assert live.numel() == size + 2 * GUARD
    guards = torch.cat([live[:GUARD], live[-GUARD:]]).cpu().numpy().view(np.uint8)
    return bool((guards == 0x55).all())


def _check_bounds(batch: SegmentBatch, indices: Tensor) -> None:
    low = np.repeat(batch.table[:-1, 1], np.diff(batch.table[:, 3]))
    high = low + np.repeat(batch.table[:-1, 2], np.diff(batch.table[:, 3]))
    found = indices.cpu().numpy()
    assert ((low <= found) & (found < high)).all()


def _same(found: Tensor, expected: Any) -> None:
    array = found.cpu().numpy()
    if expected.dtype.kind == "u":
        assert found.dtype == INT_DTYPES[expected.dtype.itemsize]
        array = array.view(expected.dtype)
    np.testing.assert_array_equal(array, expected)
