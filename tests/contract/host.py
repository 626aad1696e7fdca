"""What the kernels that only the host has promise, as checks against the reference."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from deltachain.kernels.arrays import StagedSteps, StepStreams, WindowPlace
from deltachain.types import BITS_DTYPES, Bits, Indices
from tests.contract import reference
from tests.contract.kernels import pairs


class HostArm(Protocol):
    def join_planes(self, planes: Sequence[Any], out: Bits) -> None: ...

    def decode_steps(self, segments: Any, streams: StepStreams) -> tuple[Indices, Bits]: ...

    def stage_steps(
        self,
        segments: Any,
        streams: StepStreams,
        box: WindowPlace,
        weights: Bits,
        key: tuple[int, int],
    ) -> StagedSteps: ...

    def exchange_(self, one: Bits, other: Bits, done: Indices, end: int) -> None: ...


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


def check_stage(arm: HostArm) -> None:
    rng = np.random.default_rng(12)
    for segments, streams, indices, _ in _coded():
        first = int(indices[0])
        boxes = (
            WindowPlace(0, 0, np.array([(7000, 1, 1)])),
            WindowPlace(2000, 5, np.array([(2500, 1, 1)])),
            WindowPlace(3, 1, np.array([(800, 7, 5), (4, 1, 1)])),
            WindowPlace(first, 2, np.empty((0, 3), np.int64)),
            WindowPlace(1 << 33, 9, np.array([(400, 7, 4), (4, 1, 1)])),
        )
        for box in boxes:
            room = box.at + 1 + int(((box.dims[:, 0] - 1) * box.dims[:, 2]).sum())
            weights = rng.integers(0, 256, room * 8, np.uint8).view(streams.wide.dtype)[:room]
            before = weights.copy()
            expected = reference.stage_steps(segments, streams, box, weights, (1 << 63, 12345))
            found = arm.stage_steps(segments, streams, box, weights, (1 << 63, 12345))
            np.testing.assert_array_equal(weights, before)
            assert found[3:] == expected[3:]
            for one, other in zip(found[:3], expected[:3], strict=True):
                assert one.dtype == other.dtype
                np.testing.assert_array_equal(one, other)


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
    check_stage,
)
