from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltachain.codec import Change, Part, encode_part
from deltachain.codec.container import SEGMENT
from deltachain.codec.rows import own_digests
from deltachain.delta import ABSOLUTE, STEP, TensorDelta
from deltachain.types import WIRE_DTYPES, Bits, StateDigest, TensorSpec

SHAPES = ((), (0,), (1,), (3, 0, 2), (7,), (17, 3), (2, 5, 13), (1000,))
KINDS = ("step", "overwrite", "dense")
DENSITIES = (0.0, 0.001, 0.02, 0.3, 1.0)


def same(found: TensorDelta, given_: TensorDelta) -> bool:
    indices = found.indices is given_.indices or np.array_equal(
        np.asarray(found.indices), np.asarray(given_.indices)
    )
    return (
        found.spec == given_.spec
        and found.is_dense == given_.is_dense
        and bool(indices)
        and np.array_equal(found.values, given_.values)
        and (not found.nnz or bool(found.absolute.all()) == bool(given_.absolute.all()))
    )


def values_of(rng: np.random.Generator, spec: TensorSpec, count: int) -> Bits:
    """Small steps of both signs, those around each limit, and random bits; never zero."""
    edges = np.array([1, -1, 2, -2, 254, 255, 256, -254, -255, -256])
    small = rng.choice(edges, count).astype(spec.bits_dtype)
    wild = rng.integers(0, 256, count * spec.itemsize, np.uint8).view(spec.bits_dtype)
    values: Bits = np.where(rng.random(count) < 0.7, small, wild)
    values[values == 0] = 1
    return values


def delta_of(seed: int, spec: TensorSpec, kind: str, density: float) -> TensorDelta:
    rng = np.random.default_rng(seed)
    if kind == "dense":
        return TensorDelta.dense(spec, values_of(rng, spec, spec.numel))
    indices = np.flatnonzero(rng.random(spec.numel) < density)
    values = values_of(rng, spec, indices.size)
    absolute = ABSOLUTE if kind == "overwrite" else STEP
    return TensorDelta(spec=spec, indices=indices, values=values, absolute=absolute)


tensors = st.tuples(
    st.integers(0, 2**32),
    st.sampled_from(sorted(WIRE_DTYPES)),
    st.sampled_from(SHAPES),
    st.sampled_from(KINDS),
    st.sampled_from(DENSITIES),
)


def deltas_of(rows: list[tuple[Any, ...]]) -> list[TensorDelta]:
    return [
        delta_of(seed, TensorSpec(f"t{n}", dtype, shape), kind, density)
        for n, (seed, dtype, shape, kind, density) in enumerate(rows)
    ]


def part_of(delta: TensorDelta) -> Part:
    return Part.from_bytes(encode_part([Change(delta, StateDigest())]).data)


@settings(max_examples=100)
@given(st.lists(tensors, max_size=8))
def test_what_is_encoded_decodes_to_the_same(rows: list[tuple[Any, ...]]) -> None:
    deltas = deltas_of(rows)
    encoded = encode_part(Change(delta, StateDigest(n, 7)) for n, delta in enumerate(deltas))
    part = Part.from_bytes(encoded.data)
    part.verify()
    assert [same(a, b) for a, b in zip(part, deltas, strict=True)] == [True] * len(deltas)
    assert all(same(part.read(delta.spec.name), delta) for delta in reversed(deltas))
    assert list(own_digests(part.rows.values()).values()) == [
        StateDigest(n, 7) for n in range(len(deltas))
    ]
    assert (part.digest, part.nnz) == (encoded.directory, encoded.nnz)


@settings(max_examples=60)
@given(st.lists(tensors.filter(lambda row: row[3] != "step"), max_size=6))
def test_raw_parts_decode_to_the_same(rows: list[tuple[Any, ...]]) -> None:
    deltas = deltas_of(rows)
    encoded = encode_part((Change(delta, StateDigest()) for delta in deltas), raw=True)
    part = Part.from_bytes(encoded.data)
    part.verify()
    assert [same(a, b) for a, b in zip(part, deltas, strict=True)] == [True] * len(deltas)
    assert set(encoded.encodings) <= {"raw", "plain"}


@settings(max_examples=60)
@given(
    st.sets(
        st.one_of(
            st.integers(0, 3 * SEGMENT + 5),
            st.sampled_from((1, 2, 3)).map(lambda n: n * SEGMENT),
            st.sampled_from((1, 2, 3)).map(lambda n: n * SEGMENT - 1),
        ),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from((1, 4)),
)
def test_indices_survive_the_borders_of_segments(indices: set[int], width: int) -> None:
    spec = TensorSpec("large", {1: "I8", 4: "F32"}[width], (3 * SEGMENT + 6,))
    at = np.array(sorted(indices), np.int64)
    values = (np.arange(at.size) % 250 + 1).astype(spec.bits_dtype)
    delta = TensorDelta(spec=spec, indices=at, values=values)
    part = part_of(delta)
    assert same(part.read("large"), delta)
    segments = part.directory.segments
    assert segments.start == tuple(sorted({int(i) // SEGMENT * SEGMENT for i in at}))
    assert sum(segments.nnz) == at.size


@pytest.mark.parametrize("distance", [1, 254, 255, 256, 509, 510, 65_534, 65_535, 65_536, 131_070])
@pytest.mark.parametrize("nnz", [2, 4000])
def test_every_distance_survives_either_width_of_gaps(distance: int, nnz: int) -> None:
    # Many changes make a dense tensor, which takes gaps of one byte; two make a sparse one.
    far = [distance, 2 * distance]
    close = range(2 * distance + 1, 2 * distance + nnz - 1)
    indices = np.array([*far, *close], np.int64)
    spec = TensorSpec("w", "U16", (400_000,))
    delta = TensorDelta(spec=spec, indices=indices, values=np.ones(indices.size, np.uint16))
    part = part_of(delta)
    assert part.rows["w"].gap == (1 if nnz == 4000 else 2)
    assert same(part.read("w"), delta)


@pytest.mark.parametrize("kind", ["overwrite", "dense"])
def test_tensors_of_several_frames_survive(kind: str) -> None:
    spec = TensorSpec("large", "U8", (2 * SEGMENT + 9,))
    rng = np.random.default_rng(3)
    values = rng.integers(0, 256, spec.numel, np.uint8)
    delta = TensorDelta.dense(spec, values)
    if kind == "overwrite":
        delta = TensorDelta(
            spec=spec, indices=np.arange(spec.numel), values=values, absolute=ABSOLUTE
        )
    part = part_of(delta)
    part.verify()
    assert {len(row.stored) for row in part.directory.streams} == {3}
    assert same(part.read("large"), delta)


@pytest.mark.parametrize(("dtype", "first", "wide"), [("F16", 1, None), ("F8_E5M2", 0, (0,))])
def test_every_step_of_eight_and_sixteen_bits_survives(
    dtype: str, first: int, wide: tuple[int, ...] | None
) -> None:
    count = 1 << 8 * WIRE_DTYPES[dtype]
    spec = TensorSpec("w", dtype, (first + count - 1,))
    steps = np.arange(1, count, dtype=spec.bits_dtype)
    delta = TensorDelta(spec=spec, indices=np.arange(first, spec.numel), values=steps)
    part = part_of(delta)
    assert same(part.read("w"), delta)
    assert wide in (None, part.directory.segments.wide)
