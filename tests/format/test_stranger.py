"""A reader made from FORMAT.md alone finds in every file what deltachain finds."""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from deltachain.codec import Change, Part, encode_part
from deltachain.delta import OldBits
from deltachain.errors import MalformedError
from deltachain.format.keys import digest_key
from deltachain.kernels import host
from deltachain.types import WIRE_DTYPES, Bits, StateDigest, TensorSpec
from tests.format import freeze, stranger, stranger_chain
from tests.format.forge import Forgery, take_apart
from tests.format.stranger import RefusedError

Edit = Callable[[Forgery], object]

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
    for module in (stranger, stranger_chain):
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


def compare(part: Part, theirs: dict[str, stranger.Delta]) -> None:
    assert list(theirs) == list(part.rows)
    for delta in part:
        found = theirs[delta.spec.name]
        every = range(delta.spec.numel) if delta.indices is None else delta.indices.tolist()
        assert list(found.indices) == list(every)
        assert found.values == delta.values.tolist()
        assert found.is_absolute == bool(delta.absolute)


@pytest.mark.parametrize("encoding", ["step", "overwrite", "dense", "raw", "plain"])
def test_stranger_finds_the_same_in_parts_of_every_dtype(encoding: str) -> None:
    items = [change(*model, encoding) for model in models(1)]
    data = encode_part(items, raw=encoding in ("raw", "plain")).data
    theirs = stranger.read_part(data)
    compare(Part.from_bytes(data), theirs)
    assert {found.row["encoding"] for found in theirs.values()} == {encoding}


@pytest.mark.parametrize("encoding", ["step", "overwrite", "dense"])
def test_stranger_reads_buckets_whose_tensors_take_turns(encoding: str) -> None:
    by_shape = sorted(models(1), key=lambda model: model[0].name.rpartition(".")[2])
    data = encode_part([change(*model, encoding) for model in by_shape]).data
    ours = Part.from_bytes(data)
    assert max(row.bucket for row in ours.rows.values()) == 3  # one a width, in many turns
    compare(ours, stranger.read_part(data))


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


NAME = "w"
SPEC = TensorSpec(NAME, "BF16", (8, 6))
OLD: Bits = np.array([0x3C00 + 61 * n % 1024 for n in range(48)], np.uint16)


def part_of(cuts: int = 1) -> bytes:
    return freeze.tiles_beside(cuts)[0]


def test_stranger_finds_the_same_in_tensors_of_every_dtype() -> None:
    items = list(models(5))
    data = encode_part(freeze.as_max(*item) for item in items).data
    part = Part.from_bytes(data)
    theirs = stranger.read_part(data, {spec.name: old.tolist() for spec, old, _ in items})
    for spec, old, new in items:
        ours, found = part.read(spec.name, old=OldBits(old)), theirs[spec.name]
        assert list(found.indices) == np.flatnonzero(old != new).tolist()
        assert ours.indices is not None
        assert list(found.indices) == ours.indices.tolist()
        assert list(found.values) == ours.values.tolist() == (new - old)[ours.indices].tolist()


@pytest.mark.parametrize("cuts", [1, 2, 3, 6])
def test_stranger_reads_tiles_side_by_side(cuts: int) -> None:
    data = part_of(cuts)
    ours = Part.from_bytes(data).read(NAME, old=OldBits(OLD))
    found = stranger.read_part(data, {NAME: OLD.tolist()})[NAME]
    assert ours.indices is not None
    assert list(found.indices) == ours.indices.tolist() == [0, 7, 8, 20, 47]
    assert list(found.values) == ours.values.tolist() == [1, 0xFFFF, 3, 0x8000, 40]


def edit(stream: str, at: int, value: int) -> Edit:
    def act(pieces: Forgery) -> None:
        data = bytearray(pieces.streams[stream])
        data[at] = value
        pieces.streams[stream] = bytes(data)

    return act


def cut(more: int) -> Edit:
    def act(pieces: Forgery) -> None:
        data = pieces.streams["#0.tile"]
        pieces.streams["#0.tile"] = data[:more] if more < 0 else data + bytes(more)
        pieces.set_tile_nbytes(0, pieces.tile_nbytes(0) + more)

    return act


def count(pieces: Forgery) -> None:
    nbytes = pieces.tile_nbytes(0)
    pieces.segments["nnz"] = [4]
    pieces.set_tile_nbytes(0, nbytes)


def row(**fields: object) -> Edit:
    return lambda pieces: pieces.rows[0].update(fields)


def ends(pieces: Forgery) -> None:
    pieces.rows[0]["gap"] = 2
    pieces.segments["length"] = [47]


NAMES = ("w", "w:", ":w", "-1:w", "+0:w", "00:w", "\u0660:w", "1:w", "0" * 5000 + ":w")
REFUSALS: dict[str, Edit] = {
    "a rate beyond 20": edit("#0.class", 120, 21),
    "a size beyond 31": edit("#0.class", 256 + 120, 32),
    "a size without a rate": edit("#0.class", 256 + 3, 0),
    "other old bits": edit("#0.class", 120, 0),
    "a tile that ends early": cut(-1),
    "a tile that ends late": cut(1),
    "padding that is not zero": edit("#0.tile", -1, 0xFF),
    "another number of elements": count,
    "a count in the row": row(nnz=5),
    "no tiles": row(gap=0),
    "tiles that do not divide the columns": row(gap=4),
    "too many tiles": row(gap=66),
    "a segment that ends inside a row": ends,
    "exceptions": lambda pieces: pieces.segments.update(exceptions=[1]),
    "too many bytes": cut(400),
    "fewer bytes than none": lambda pieces: pieces.set_tile_nbytes(0, -1),
    "a size beyond 63 bits": lambda pieces: pieces.set_tile_nbytes(0, 1 << 64),
    **{f"the name {name[:10]!r}": row(name=name) for name in NAMES},
}


def both_refuse(data: bytes, old: Mapping[str, Sequence[int]]) -> None:
    with pytest.raises(MalformedError):
        Part.from_bytes(data).read(NAME, old=OldBits(OLD))
    with pytest.raises(RefusedError):
        stranger.read_part(data, old)


@pytest.mark.parametrize("name", REFUSALS)
def test_both_readers_refuse(name: str) -> None:
    pieces = take_apart(part_of())
    REFUSALS[name](pieces)
    both_refuse(pieces.build(), {NAME: OLD.tolist()})


@pytest.mark.parametrize("name", ["2:1.x", "0:w", "6:", "06:x", "4:a", "5:"])
def test_both_readers_read_each_name_in_one_form(name: str) -> None:
    alike = [TensorSpec(name, "BF16", (8, 6)) for name in ("w.0.a", "w.0.ab", "w.1.a", "w.0:é")]
    parts = [freeze.as_max(spec, OLD, OLD ^ np.uint16(1)) for spec in alike]
    pieces = take_apart(encode_part(parts).data)
    stored = [row["name"] for row in pieces.rows]
    assert stored == ["0:w.0.a", "5:b", "2:1.a", "2:0:é"]
    old = {spec.name: OLD.tolist() for spec in alike}
    for data in (pieces.build(), encode_part(parts).data):
        assert list(Part.from_bytes(data).rows) == list(stranger.read_part(data, old)) == list(old)
    pieces.rows[3]["name"] = name
    both_refuse(pieces.build(), old)


def test_both_readers_refuse_names_of_too_many_characters() -> None:
    pieces = take_apart(freeze.tiny_max())
    row = pieces.rows[0] | {"name": "0:" + "a" * (1 << 20), "segments": 0, "nnz": 0}
    longer = [row | {"name": f"{1 << 20}:{chr(0x4E00 + n)}"} for n in range(64)]
    pieces.rows[:0] = [row, *longer]
    data = pieces.build()
    assert len(data) < 1 << 20
    with pytest.raises(MalformedError, match="names of more than"):
        Part.from_bytes(data)
    with pytest.raises(RefusedError, match="names"):
        stranger.read_part(data)


def test_both_readers_refuse_a_large_tensor_without_old_bits() -> None:
    pieces = take_apart(freeze.tiny_max())
    pieces.rows[0]["shape"] = [(1 << 20) + 1]
    both_refuse(pieces.build(), {})


def test_sizes_of_tiles_are_refused_in_more_bytes_than_needed() -> None:
    pieces = take_apart(part_of(2))
    data = pieces.streams["#0.tile"]
    assert data[0] < 128
    for wrong in (bytes([data[0] | 128, 0]), bytes([255, 255, 255, 255, 1]), b"\x7f"):
        pieces = take_apart(part_of(2))
        pieces.streams["#0.tile"] = wrong + data[1:]
        pieces.set_tile_nbytes(0, len(wrong) + len(data) - 1)
        both_refuse(pieces.build(), {NAME: OLD.tolist()})
