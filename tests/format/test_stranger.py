"""A reader made from FORMAT.md alone finds in every file what deltachain finds."""

import ast
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltachain.chain import tags
from deltachain.codec import Change, Part, encode_part
from deltachain.delta import OldBits
from deltachain.errors import MalformedError
from deltachain.format import keys
from deltachain.format.documents import Tag, dump, parse, seal, unseal
from deltachain.format.keys import digest_key
from deltachain.kernels import host
from deltachain.types import WIRE_DTYPES, Bits, StateDigest, TensorSpec
from tests.format import freeze, freeze_tags, stranger, stranger_chain
from tests.format.forge import no_documents, take_apart
from tests.format.stranger import RefusedError

FILES = freeze.frozen(freeze_tags.FOLDER)


def get(key: str) -> bytes | None:
    file = freeze.FOLDER / "chain" / key
    return FILES.get(key) or (file.read_bytes() if file.is_file() else None)


def test_the_frozen_records_are_written_again_and_read() -> None:
    assert len(FILES) == 4
    assert freeze_tags.build() == FILES
    chain = freeze_tags.chain()
    for key, data in FILES.items():
        chain.store.put(key, data)
    best = tags.read(chain, "best")
    assert best is not None
    assert (best.version, best.number, best.state) == (3, 1, chain.read(3).manifest.state)
    assert tags.committed(chain, best).version == 3
    assert tags.read(chain, "eval-step-10") is None
    assert tags.read_all(chain) == (best,)


def test_a_stranger_finds_the_same() -> None:
    assert stranger_chain.tagged(get, "best") == 3
    assert stranger_chain.tagged(get, "eval-step-10") is None
    assert stranger_chain.tagged(get, "other") is None


@pytest.mark.parametrize("at", [20, 120, 300, -20])
def test_a_record_with_one_byte_changed_is_refused(at: int) -> None:
    data = bytearray(FILES[keys.tag_key("best", 1)])
    data[at] ^= 1

    def changed(key: str) -> bytes | None:
        return bytes(data) if key == keys.tag_key("best", 1) else get(key)

    with pytest.raises(RefusedError):
        stranger_chain.tagged(changed, "best")
    with pytest.raises(Exception, match="tags/best"):
        unseal(bytes(data), Tag, key="tags/best/00000001.json")


@pytest.mark.parametrize("name", sorted(no_documents(b'{"ext":{},"format":1}')))
def test_what_is_no_document_is_no_record(name: str) -> None:
    data = dump(unseal(FILES[keys.tag_key("best", 1)], Tag, key="k"))
    with pytest.raises(Exception, match="k: "):
        parse(no_documents(data)[name], Tag, key="k")


def test_a_record_of_another_name_is_refused_by_both() -> None:
    record = unseal(FILES[keys.tag_key("best", 1)], Tag, key="k")
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    for other in ({"name": "worst"}, {"number": 0}, {"chain": "x"}, {"manifest": "0" * 64}):
        data = seal(Tag(**fields | other))

        def changed(key: str, data: bytes = data) -> bytes | None:
            return data if key == keys.tag_key("best", 1) else get(key)

        with pytest.raises(RefusedError):
            stranger_chain.tagged(changed, "best")


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
        lanes = stranger.tensor_lanes(spec.name, spec.dtype, spec.shape, new.tolist())
        assert stranger.state_text(lanes) == str(host.digest(digest_key(spec), new))
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


def refusals() -> Iterator[tuple[str, Any]]:
    yield "a rate beyond 20", lambda p: edit(p, "#0.class", 120, 21)
    yield "a size beyond 31", lambda p: edit(p, "#0.class", 256 + 120, 32)
    yield "a size without a rate", lambda p: edit(p, "#0.class", 256 + 3, 0)
    yield "other old bits", lambda p: edit(p, "#0.class", 120, 0)
    yield "a tile that ends early", lambda p: cut(p, -1)
    yield "a tile that ends late", lambda p: cut(p, 1)
    yield "padding that is not zero", lambda p: edit(p, "#0.tile", -1, 0xFF)
    yield "another number of elements", lambda p: count(p, 4)
    yield "a count in the row", lambda p: p.rows[0].update(nnz=5)
    yield "no tiles", lambda p: gap(p, 0)
    yield "tiles that do not divide the columns", lambda p: gap(p, 4)
    yield "too many tiles", lambda p: gap(p, 66)
    yield "a segment that ends inside a row", lambda p: ends(p, 2, 47)
    yield "exceptions", lambda p: p.segments.update(exceptions=[1])
    yield "too many bytes", lambda p: cut(p, 400)
    yield "fewer bytes than none", lambda p: p.set_tile_nbytes(0, -1)
    yield "a size beyond 63 bits", lambda p: p.set_tile_nbytes(0, 1 << 64)
    for name in ("w", "w:", ":w", "-1:w", "+0:w", "00:w", "\u0660:w", "1:w", "0" * 5000 + ":w"):
        yield f"the name {name[:10]!r}", partial(rename, name)


def rename(name: str, pieces: Any) -> None:
    pieces.rows[0]["name"] = name


def edit(pieces: Any, stream: str, at: int, value: int) -> None:
    data = bytearray(pieces.streams[stream])
    data[at] = value
    pieces.streams[stream] = bytes(data)


def cut(pieces: Any, more: int) -> None:
    data = pieces.streams["#0.tile"]
    pieces.streams["#0.tile"] = data[:more] if more < 0 else data + bytes(more)
    pieces.set_tile_nbytes(0, pieces.tile_nbytes(0) + more)


def count(pieces: Any, nnz: int) -> None:
    nbytes = pieces.tile_nbytes(0)
    pieces.segments["nnz"] = [nnz]
    pieces.set_tile_nbytes(0, nbytes)


def gap(pieces: Any, value: int) -> None:
    pieces.rows[0]["gap"] = value


def ends(pieces: Any, tiles: int, length: int) -> None:
    gap(pieces, tiles)
    pieces.segments["length"] = [length]


@pytest.mark.parametrize("name", [name for name, _ in refusals()])
def test_both_readers_refuse(name: str) -> None:
    pieces = take_apart(part_of())
    dict(refusals())[name](pieces)
    data = pieces.build()
    with pytest.raises(MalformedError):
        Part.from_bytes(data).read(NAME, old=OldBits(OLD))
    with pytest.raises(RefusedError):
        stranger.read_part(data, {NAME: OLD.tolist()})


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
    forged = pieces.build()
    with pytest.raises(MalformedError):
        Part.from_bytes(forged)
    with pytest.raises(RefusedError):
        stranger.read_part(forged, old)


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
    data = pieces.build()
    with pytest.raises(MalformedError):
        Part.from_bytes(data)
    with pytest.raises(RefusedError):
        stranger.read_part(data)


def test_sizes_of_tiles_are_refused_in_more_bytes_than_needed() -> None:
    pieces = take_apart(part_of(2))
    data = pieces.streams["#0.tile"]
    assert data[0] < 128
    for wrong in (bytes([data[0] | 128, 0]), bytes([255, 255, 255, 255, 1]), b"\x7f"):
        pieces = take_apart(part_of(2))
        pieces.streams["#0.tile"] = wrong + data[1:]
        pieces.set_tile_nbytes(0, len(wrong) + len(data) - 1)
        forged = pieces.build()
        with pytest.raises(MalformedError):
            Part.from_bytes(forged).read(NAME, old=OldBits(OLD))
        with pytest.raises(RefusedError):
            stranger.read_part(forged, {NAME: OLD.tolist()})
