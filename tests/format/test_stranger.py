"""A reader made from FORMAT.md alone finds in every file what deltachain finds."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltachain.codec import Change, Part, encode_part
from deltachain.format.keys import digest_key
from deltachain.kernels import host
from deltachain.types import WIRE_DTYPES, Bits, StateDigest, TensorSpec
from tests.format import (
    freeze,
    stranger,
    stranger_base,
    stranger_chain,
    stranger_signed,
    stranger_tiles,
)
from tests.format.stranger_base import RefusedError

V1 = freeze.FOLDER
EXPECTED: dict[str, Any] = json.loads((V1 / "expected.json").read_bytes())
SHAPES: Sequence[tuple[int, ...]] = ((), (0, 3), (1,), (5, 7), (700,), (3, 400))


def random_bits(rng: np.random.Generator, spec: TensorSpec) -> Bits:
    bits: Bits = rng.integers(0, 256, spec.nbytes, np.uint8).view(spec.bits_dtype)
    return bits


def moved(rng: np.random.Generator, old: Bits, density: float) -> Bits:
    new = old.copy()
    where = rng.random(old.size) < density
    small = rng.choice(np.array([1, -1, 2, -3, 254, -255, 255, -256]), old.size)
    large = rng.integers(0, 256, old.nbytes, np.uint8).view(old.dtype)
    steps = np.where(rng.random(old.size) < 0.9, small.astype(old.dtype), large)
    new[where] += steps[where]
    return new


def change(spec: TensorSpec, old: Bits, new: Bits, encoding: str) -> Change:
    if encoding in ("dense", "plain"):
        return freeze.dense(spec, new)
    return (freeze.step if encoding == "step" else freeze.absolute)(spec, old, new)


def models(seed: int) -> Iterator[tuple[TensorSpec, Bits, Bits]]:
    rng = np.random.default_rng(seed)
    for dtype in WIRE_DTYPES:
        for number, shape in enumerate(SHAPES):
            spec = TensorSpec(f"{dtype}.{number}", dtype, shape)
            old = random_bits(rng, spec)
            density = float(rng.choice([0.001, 0.01, 0.3, 1.0]))
            yield spec, old, moved(rng, old, density)


def test_stranger_imports_nothing_of_ours() -> None:
    readers = (stranger, stranger_base, stranger_chain, stranger_signed, stranger_tiles)
    for module in readers:
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        names = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        names |= {str(n.module) for n in nodes if isinstance(n, ast.ImportFrom)}
        names = {name for name in names if not name.startswith("tests.format.stranger")}
        assert names <= {
            *("__future__", "collections.abc", "dataclasses", "itertools", "json", "re", "typing"),
            *("blake3", "cryptography.exceptions", "zstandard"),
            "cryptography.hazmat.primitives.asymmetric.ed25519",
        }


@pytest.mark.parametrize("encoding", ["step", "overwrite", "dense", "raw", "plain"])
def test_stranger_finds_the_same_in_parts_of_every_dtype(encoding: str) -> None:
    items = [change(*model, encoding) for model in models(1)]
    data = encode_part(items, raw=encoding in ("raw", "plain")).data
    ours, theirs = Part.from_bytes(data), stranger.read_part(data)
    assert list(theirs) == list(ours.rows)
    for delta in ours:
        found = theirs[delta.spec.name]
        every = range(delta.spec.numel) if delta.indices is None else delta.indices.tolist()
        assert list(found.indices) == list(every)
        assert found.values == delta.values.tolist()
        assert found.is_absolute == bool(delta.absolute)
        assert found.row["encoding"] == encoding


@pytest.mark.parametrize("encoding", ["step", "overwrite", "dense"])
def test_stranger_reads_buckets_whose_tensors_take_turns(encoding: str) -> None:
    by_shape = sorted(models(1), key=lambda model: model[0].name.rpartition(".")[2])
    data = encode_part([change(*model, encoding) for model in by_shape]).data
    ours, theirs = Part.from_bytes(data), stranger.read_part(data)
    assert max(row.bucket for row in ours.rows.values()) == 3  # one a width, in many turns
    for delta in ours:
        found = theirs[delta.spec.name]
        every = range(delta.spec.numel) if delta.indices is None else delta.indices.tolist()
        assert list(found.indices) == list(every)
        assert found.values == delta.values.tolist()


@pytest.mark.parametrize("encoding", ["step", "overwrite", "dense"])
def test_stranger_reads_several_segments_and_frames(encoding: str) -> None:
    spec = TensorSpec("large", "U8", ((1 << 20) + 3,))
    old = np.zeros(spec.numel, np.uint8)
    new = old.copy()
    new[[0, 254, 255, 70_000, (1 << 20) - 1, 1 << 20, (1 << 20) + 2]] = [1, 2, 3, 4, 255, 128, 7]
    data = encode_part([change(spec, old, new, encoding)]).data
    found = stranger.read_part(data)["large"]
    assert len(Part.from_bytes(data).directory.segments.start) == 2
    bits = old.tolist()
    found.apply(bits)
    assert bytes(bits) == new.tobytes()


def test_stranger_computes_the_same_state_digests() -> None:
    compared = 0
    for spec, _, new in models(2):
        lanes = stranger_base.tensor_lanes(spec.name, spec.dtype, spec.shape, new.tolist())
        assert stranger_base.state_text(lanes) == str(host.digest(digest_key(spec), new))
        compared += new.size
    assert compared > 10_000


@pytest.mark.parametrize("name", EXPECTED["parts"])
def test_stranger_reads_the_frozen_parts(name: str) -> None:
    found = stranger.read_part((V1 / name).read_bytes())
    assert {
        tensor: {
            **{field: delta.row[field] for field in ("encoding", "dtype", "shape")},
            "indices": None if delta.row["encoding"] in ("dense", "plain") else list(delta.indices),
            "values": delta.bytes().hex(),
        }
        for tensor, delta in found.items()
    } == EXPECTED["parts"][name]


def in_folder(key: str) -> bytes | None:
    file = V1 / "chain" / key
    return file.read_bytes() if file.is_file() else None


def as_hex(chain: stranger_chain.Chain, weights: stranger_chain.Weights) -> dict[str, str]:
    widths = {name: WIRE_DTYPES[dtype] for name, (dtype, _) in chain.specs.items()}
    return {
        name: b"".join(bit.to_bytes(widths[name], "little") for bit in bits).hex()
        for name, bits in weights.items()
    }


def test_stranger_rebuilds_the_frozen_chain_by_every_way() -> None:
    chain = stranger_chain.Chain(in_folder)
    assert chain.head() == 3
    ways = []
    for version in range(4):
        for route in chain.routes(version):
            found = as_hex(chain, chain.follow(route))
            assert found == EXPECTED["versions"][version]["weights"]
            ways.append([edge["kind"] for _, edge in route])
    assert ways == [
        ["anchor"],
        ["anchor", "delta"],
        ["anchor", "delta", "delta"],
        ["anchor"],
        ["anchor", "skip"],
        ["anchor", "delta", "delta", "delta"],
        ["anchor", "delta"],
        ["anchor", "skip", "delta"],
    ]


@pytest.mark.parametrize(
    "key", [str(f.relative_to(V1 / "chain")) for f in sorted((V1 / "chain").rglob("*.*"))]
)
def test_stranger_refuses_a_chain_with_one_byte_changed(key: str) -> None:
    data = bytearray((V1 / "chain" / key).read_bytes())
    data[-20] ^= 1

    def get(asked: str) -> bytes | None:
        return bytes(data) if asked == key else in_folder(asked)

    def rebuild() -> None:
        chain = stranger_chain.Chain(get)
        for version in range(chain.head() + 1):
            for route in chain.routes(version):
                chain.follow(route)

    if key == "head.json" or key.startswith("assets/"):  # which it does not read
        rebuild()
    else:
        with pytest.raises(RefusedError):
            rebuild()


@pytest.mark.parametrize("encoding", ["step", "overwrite", "raw"])
def test_stranger_follows_generated_chains(encoding: str) -> None:
    rng = np.random.default_rng(7)
    specs = [TensorSpec(f"t.{d}", d, (2, 30)) for d in WIRE_DTYPES]
    builder = freeze.Builder(specs, {})
    bits = {spec.name: random_bits(rng, spec) for spec in specs}
    raw = encoding == "raw"
    anchor = builder.put("anchor", None, 0, [freeze.dense(s, bits[s.name]) for s in specs], raw=raw)
    builder.commit(0, anchor, state(specs, bits), nnz=builder.numel)
    for version in range(1, 5):
        new = {spec.name: moved(rng, bits[spec.name], 0.1) for spec in specs}
        items = [
            change(s, bits[s.name], new[s.name], "dense" if n % 5 == version else encoding)
            for n, s in enumerate(specs)
        ]
        bits = new
        edge = builder.put("delta", version - 1, version, items, raw=raw)
        builder.commit(version, edge, state(specs, bits), nnz=0)
    store = builder.store
    chain = stranger_chain.Chain(lambda k: store.get(k) if store.find(k) else None)
    (route,) = chain.routes(4)
    weights = chain.follow(route)
    assert weights == {name: array.tolist() for name, array in bits.items()}


def state(specs: Sequence[TensorSpec], bits: dict[str, Bits]) -> StateDigest:
    digests = (host.digest(digest_key(spec), bits[spec.name]) for spec in specs)
    return sum(digests, StateDigest())
