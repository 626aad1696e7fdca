"""What the kernels that only the host has promise, as checks against the reference."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from deltachain.kernels.arrays import BrokenSegmentError, StagedBatch, StepStreams, WindowPlace
from deltachain.kernels.segments import (
    LivePlacement,
    PlacementTable,
    SegmentBatch,
    StreamLayout,
    TensorStreams,
    pack,
)
from deltachain.types import BITS_DTYPES, Bits, Indices
from tests.contract import reference
from tests.contract.kernels import pairs


class HostArm(Protocol):
    def join_planes(self, planes: Sequence[Any], out: Bits) -> None: ...

    def decode_steps(self, segments: Any, streams: StepStreams) -> tuple[Indices, Bits]: ...

    def exchange_(self, one: Bits, other: Bits, done: Indices, end: int) -> None: ...


class BatchArm(Protocol):
    def stage_batch(self, batch: SegmentBatch, places: PlacementTable) -> StagedBatch: ...

    def write_batch_(self, places: PlacementTable, staged: StagedBatch, bits: Bits) -> None: ...


def check_planes(arm: HostArm) -> None:
    for _, bits in pairs():
        planes = [bits.view(np.uint8)[k :: bits.itemsize].copy() for k in range(bits.itemsize)]
        whole = np.full(bits.size + 2, 77, bits.dtype)
        arm.join_planes(planes, whole[1:-1])
        np.testing.assert_array_equal(whole[1:-1], bits)
        assert whole[0] == whole[-1] == 77


def check_exchange(arm: HostArm) -> None:
    for before, after in pairs():
        one, other, done = before.copy(), after.copy(), np.zeros(1, np.int64)
        for end in (after.size // 3, after.size, after.size, after.size // 2, 0):
            arm.exchange_(one, other, done, end)
            assert done[0] == end
            for found, first, rest in ((one, after, before), (other, before, after)):
                np.testing.assert_array_equal(found[:end], first[:end])
                np.testing.assert_array_equal(found[end:], rest[end:])


def check_decode(arm: HostArm) -> None:
    """Every width, both gaps, streams that begin inside of a byte; edges of steps and of gaps."""
    for segments, streams, indices, steps in _coded():
        found = arm.decode_steps(segments, streams)
        for one, other in zip(found, (indices, steps), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


def check_hostile_decode(arm: HostArm) -> None:
    rng = np.random.default_rng(11)
    refused = 0
    for segments, streams, _, _ in _coded():
        for _ in range(40):
            name = str(rng.choice(["gaps", "sign", "exception", "magnitude", "wide"]))
            data = getattr(streams, name).copy()
            if not data.size:
                continue
            edges = [0, 1, 2, 127, 128, 129, 254, 255, -1, -2, -254, -255, 1 << 15, 1 << 31]
            value = int(rng.choice(edges)) % (1 << 8 * data.itemsize)
            data[rng.integers(data.size)] = value
            changed = streams._replace(**{name: data if name == "wide" else _frozen(data)})
            expected = _outcome(reference, segments, changed)
            assert _outcome(arm, segments, changed) == expected
            refused += isinstance(expected, str)
    assert refused > 100


BOXES = (
    WindowPlace(0, 0, np.array([(7000, 1, 1)])),
    WindowPlace(2000, 5, np.array([(2500, 1, 1)])),
    WindowPlace(3, 1, np.array([(800, 7, 5), (4, 1, 1)])),
    WindowPlace(1 << 33, 9, np.array([(400, 7, 4), (4, 1, 1)])),
)
KEY = (1 << 63, 12345)


def check_stage(arm: BatchArm) -> None:
    """Every width, gap and kind of values, in placements of one tensor; then back."""
    rng = np.random.default_rng(12)
    for segments, streams, indices, values in _coded():
        kind = streams.wide.dtype
        one = WindowPlace(int(indices[0]), 2, np.empty((0, 3), np.int64))
        boxes = (*BOXES, one)
        rooms = [box.at + 1 + int(((box.dims[:, 0] - 1) * box.dims[:, 2]).sum()) for box in boxes]
        lives = [rng.integers(0, 256, room * 8, np.uint8).view(kind)[:room] for room in rooms]
        before = [live.copy() for live in lives]
        places = _places(boxes, lives)
        for absolute in (False, True):
            batch = _batch(segments, streams, values if absolute else None)
            found = arm.stage_batch(batch, places)
            after = [live.copy() for live in before]
            for slot, (box, live, new) in enumerate(zip(boxes, before, after, strict=True)):
                alone = reference.stage_changes(indices, values, box, live, KEY)
                base = np.zeros_like(live) if absolute else live
                other = reference.stage_changes(indices, values, box, base, KEY)
                lanes = [n for one in (other[3], alone[4]) for n in (one.lane0, one.lane1)]
                assert found.sums[slot].tolist() == [*lanes, alone.positions.size]
                new[alone.positions] = other.new
                mine = [slice(at, at + n) for p, at, n in found.blocks.tolist() if p == slot]
                for name, wanted in (("positions", other), ("old", alone), ("new", other)):
                    array, expected = getattr(found, name), getattr(wanted, name)
                    joined = np.concatenate([array[:0], *(array[one] for one in mine)])
                    assert joined.dtype == expected.dtype
                    np.testing.assert_array_equal(joined, expected)
            for bits, state in ((found.new, after), (found.old, before)):
                arm.write_batch_(places, found, bits)
                for live, wanted_bits in zip(lives, state, strict=True):
                    np.testing.assert_array_equal(live, wanted_bits)


def check_hostile_stage(arm: BatchArm) -> None:
    """The first segment that breaks a rule is refused, for the reason of the reference."""
    rng = np.random.default_rng(13)
    refused = 0
    places = {n: _places(BOXES[:1], [np.zeros(7000, kind)]) for n, kind in BITS_DTYPES.items()}
    for segments, streams, _, _ in _coded():
        for _ in range(20):
            name = str(rng.choice(["gaps", "sign", "exception", "magnitude", "wide"]))
            data = getattr(streams, name).copy()
            if not data.size:
                continue
            data[rng.integers(data.size)] = rng.choice([0, 1, 2, 127, 128, 254, 255])
            changed = streams._replace(**{name: data})
            outcomes = [_outcome(reference, segments[:n], changed) for n in (1, 2, 3)]
            expected = [(n, one) for n, one in enumerate(outcomes) if isinstance(one, str)]
            found = _refusal(arm, _batch(segments, changed), places[streams.wide.itemsize])
            assert found == (expected[0] if expected else None)
            refused += bool(expected)
    assert refused > 50


def _refusal(arm: BatchArm, batch: SegmentBatch, places: PlacementTable) -> tuple[int, str] | None:
    try:
        arm.stage_batch(batch, places)
    except BrokenSegmentError as exc:
        return exc.number, str(exc)
    return None


def _places(boxes: Sequence[WindowPlace], lives: Sequence[Any]) -> PlacementTable:
    made = []
    for slot, (box, live) in enumerate(zip(boxes, lives, strict=True)):
        signed = torch.from_numpy(live if live.itemsize == 1 else live.view(f"<i{live.itemsize}"))
        dims = [(size, there, step) for size, there, step in box.dims.tolist()]
        made.append(LivePlacement(0, box.offset, dims, signed, box.at, slot))
    return PlacementTable.build(made, [KEY], torch.device("cpu"))


def _batch(segments: Any, streams: StepStreams, values: Any = None) -> SegmentBatch:
    """Segments of one tensor: of steps, or of new bits."""
    absolute, wide = values is not None, streams.wide if values is None else values
    layout = StreamLayout(wide.itemsize, streams.gaps.itemsize, absolute)
    rest = {} if absolute else {"sign": streams.sign, "exception": streams.exception}
    made = TensorStreams(
        tensor=0,
        numel=1 << 34,
        segments=segments * np.array([1, 1, 1, 1, not absolute, not absolute]),
        planes=[wide.view(np.uint8)[k :: wide.itemsize].copy() for k in range(wide.itemsize)],
        gaps=[streams.gaps.view(np.uint8)[k :: layout.gap].copy() for k in range(layout.gap)],
        magnitude=streams.magnitude[:0] if absolute else streams.magnitude,
        bit=0 if absolute else streams.sign_at,
        **rest,
    )
    return pack(layout, [made])


def _outcome(arm: Any, segments: Any, streams: StepStreams) -> object:
    try:
        return [array.tobytes() for array in arm.decode_steps(segments, streams)]
    except ValueError as exc:
        return str(exc)


def _coded() -> Iterator[tuple[Any, StepStreams, Indices, Bits]]:
    rng = np.random.default_rng(10)
    for width, dtype in BITS_DTYPES.items():
        top = 1 << (8 * width - 1)
        edges = [1, 2 * top - 1, 2, 254 % (2 * top), 255, top, top - 1, top + 1]
        for gap, count, first in ((1, 1, 0), (1, 60, 3), (2, 3, 7), (1, 3000, 5)):
            rows, pieces, indices, values = [], [], [], []
            for start in (0, 3000, 1 << 33):
                offsets = np.sort(rng.choice(3000, count, replace=False))
                steps = rng.choice(np.array(edges, dtype), count)
                split, gaps = reference.split_steps(steps), reference.encode_gaps(offsets, gap)
                counts = gaps.size, split.magnitude.size, split.wide.size
                rows.append((start, 3000, count, *counts))
                pieces.append((gaps, *split))
                indices.append(offsets + start)
                values.append(steps)
            gaps, negative, exception, magnitude, wide = map(
                np.concatenate, zip(*pieces, strict=True)
            )
            sign, flags = (
                _frozen(np.packbits(np.append(np.ones(first, np.bool_), bits), bitorder="little"))
                for bits in (negative, exception)
            )
            streams = StepStreams(
                _frozen(gaps), sign, first, flags, first, _frozen(magnitude), wide
            )
            yield np.array(rows), streams, np.concatenate(indices), np.concatenate(values)


def _frozen(array: Any) -> Any:
    return np.frombuffer(array.tobytes(), array.dtype)


HOST_CHECKS: tuple[Callable[[HostArm], None], ...] = (
    check_planes,
    check_exchange,
    check_decode,
    check_hostile_decode,
)

BATCH_CHECKS: tuple[Callable[[BatchArm], None], ...] = (check_stage, check_hostile_stage)
