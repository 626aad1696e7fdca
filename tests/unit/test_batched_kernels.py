"""Decoding and staging of many tensors at once, in Triton's interpreter, against the codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from safetensors.numpy import load

from deltachain.codec import Change, Part, encode_part
from deltachain.delta import TensorDelta
from deltachain.errors import MalformedError
from deltachain.kernels import staging
from deltachain.kernels.segments import (
    LivePlacement,
    PlacementTable,
    StreamLayout,
    TensorStreams,
    pack,
)
from deltachain.types import StateDigest, TensorSpec
from tests.contract.batches import Given, batch_of, streams_of

CPU = torch.device("cpu")
STEPS = StreamLayout(2, 1, absolute=False)


def scene(numels: tuple[int, ...], density: float, exceptions: float) -> list[Given]:
    """Changes of one tensor each, most of them by 1 or -1."""
    rng = np.random.default_rng(1)
    made = []
    for tensor, numel in enumerate(numels):
        indices = np.flatnonzero(rng.random(numel) < density)
        steps = rng.choice(np.array([1, 65535], np.uint16), indices.size)
        large = rng.random(indices.size) < exceptions
        made.append(Given(tensor, numel, indices, np.where(large, np.uint16(3), steps)))
    return made


def test_one_buffer_may_be_memory_of_the_caller() -> None:
    given = scene((900, 40), 0.3, 0.5)
    memory = torch.empty(1 << 16, dtype=torch.uint8)
    streams = [streams_of(g, STEPS, 700, 0) for g in given]
    batch = pack(STEPS, streams, lambda nbytes: memory[:nbytes].numpy())
    assert batch.buffer.ctypes.data == memory.data_ptr()
    assert batch.table.base is not None
    found = staging.decode(batch, staging.upload(batch, CPU))
    np.testing.assert_array_equal(found.indices.numpy(), np.concatenate([g.indices for g in given]))


@pytest.mark.parametrize(
    ("column", "value"),
    [(0, -1), (0, 500), (1, 1 << 21), (2, 0), (2, 701), (3, 0), (3, 1 << 20), (4, 1 << 20), (5, 9)],
)
def test_streams_that_contradict_their_segments_are_refused(column: int, value: int) -> None:
    (given,) = scene((900,), 0.3, 0.5)
    streams = streams_of(given, STEPS, 700, 0)
    segments = streams.segments.copy()
    segments[1, column] = value
    with pytest.raises(MalformedError, match="segments contradict"):
        pack(STEPS, [replace(streams, segments=segments)])


@pytest.mark.parametrize("name", ["gaps", "sign", "exception", "magnitude", "planes"])
def test_streams_of_another_length_are_refused(name: str) -> None:
    (given,) = scene((900,), 0.3, 0.5)
    streams = streams_of(given, STEPS, 700, 0)
    found: Any = getattr(streams, name)
    one = np.zeros(1, np.uint8)
    longer = (
        [np.append(plane, one) for plane in found]
        if isinstance(found, list)
        else np.append(found, one)
    )
    for other in (longer, [] if isinstance(found, list) else found[:-1]):
        changed: dict[str, Any] = {name: other}
        with pytest.raises(MalformedError, match="segments contradict"):
            pack(STEPS, [replace(streams, **changed)])


@pytest.mark.parametrize("bit", [-1, 8])
def test_a_first_bit_outside_its_byte_is_refused(bit: int) -> None:
    (given,) = scene((900,), 0.3, 0.5)
    streams: TensorStreams = replace(streams_of(given, STEPS, 700, 0), bit=bit)
    with pytest.raises(MalformedError, match="segments contradict"):
        pack(STEPS, [streams])


@pytest.mark.parametrize(
    ("at", "dims"),
    [(-1, [(4, 1, 1)]), (5, [(4, 1, 1)]), (0, [(2, 1, 1), (2, 4, 2)]), (0, [(0, 1, 1)])],
)
def test_a_box_outside_its_storage_is_refused(at: int, dims: list[tuple[int, int, int]]) -> None:
    live = torch.zeros(8, dtype=torch.int16)
    with pytest.raises(ValueError, match="placement"):
        PlacementTable.build([LivePlacement(0, 0, dims, live, at)], [(1, 2)], CPU)


def test_a_box_on_another_device_is_refused() -> None:
    live = torch.zeros(8, dtype=torch.int16, device="meta")
    with pytest.raises(ValueError, match="meta"):
        PlacementTable.build([LivePlacement(0, 0, [(4, 1, 1)], live)], [(1, 2)], CPU)


def test_streams_of_a_part_decode_to_its_deltas() -> None:
    """Ranges of a bucket's streams, as another tensor's bits begin in the middle of a byte."""
    made = scene((3_000, 70_000, 11, 1 << 21), 0.02, 0.3)
    specs = [TensorSpec(f"w{g.tensor}", "BF16", (g.numel,)) for g in made]
    deltas = [
        TensorDelta(spec=spec, indices=g.indices, values=g.values)
        for spec, g in zip(specs, made, strict=True)
    ]
    data = encode_part([Change(delta, StateDigest()) for delta in deltas]).data
    directory = Part.from_bytes(data).directory
    streams = {row.name: _inflated(load(data)[row.name], row.stored) for row in directory.streams}
    columns = directory.segments
    names = ("start", "length", "nnz", "gaps", "exceptions", "wide")
    table = np.array([getattr(columns, name) for name in names]).T
    given, at = [], np.zeros(6, np.int64)
    for number, row in enumerate(directory.tensors):
        mine, table = table[: row.segments], table[row.segments :]
        end = at + mine.sum(axis=0)
        (_, _, bit, gap, exception, wide), (_, _, last, *ends) = at.tolist(), end.tolist()
        packed = slice(bit // 8, -(-last // 8))
        given.append(
            TensorStreams(
                tensor=number,
                numel=row.spec.numel,
                segments=mine,
                planes=[_bytes(streams, f"wide.{k}")[wide : ends[2]] for k in (0, 1)],
                gaps=[_bytes(streams, "gap8")[gap : ends[0]]],
                sign=_bytes(streams, "sign")[packed],
                exception=_bytes(streams, "exception")[packed],
                magnitude=_bytes(streams, "magnitude")[exception : ends[1]],
                bit=bit % 8,
            )
        )
        at = end
    batch = pack(STEPS, given)
    found = staging.decode(batch, staging.upload(batch, CPU))
    batch.check(found.verdicts[0][1].numpy(), [spec.name for spec in specs])
    np.testing.assert_array_equal(found.indices, np.concatenate([d.indices for d in made]))
    values = np.concatenate([d.values for d in made])
    np.testing.assert_array_equal(found.values.numpy().view(np.uint16), values)


def _inflated(stored: Any, frames: Sequence[int]) -> Any:
    pieces = np.split(stored, np.cumsum(frames)[:-1])
    inflated = [zstandard.decompress(piece.tobytes()) for piece in pieces]
    return np.frombuffer(b"".join(inflated), np.uint8)


def _bytes(streams: dict[str, Any], name: str) -> Any:
    return streams.get(f"#0.{name}", np.empty(0, np.uint8))


def test_memory_for_a_device_holds_a_batch() -> None:
    memory = staging.allocator(CPU)(24)
    assert memory.view(np.int64).shape == (3,)
    assert memory.ctypes.data % 8 == 0


def test_placements_of_another_width_are_refused() -> None:
    live = torch.zeros(40, dtype=torch.int32)
    table = PlacementTable.build([LivePlacement(0, 0, [(40, 1, 1)], live)], [(1, 2)], CPU)
    batch = batch_of(scene((40,), 0.5, 0.0), STEPS)
    changes = staging.decode(batch, staging.upload(batch, CPU))
    with pytest.raises(ValueError, match="another width"):
        staging.stage(changes, table, ["w"])
