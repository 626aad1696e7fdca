"""Writes frozen fixtures, once and never again: ``python -m tests.format.freeze v1``.

``FROZEN`` makes the files of each folder, so that tests hold today's writer to the bytes of that
day. A signed chain's parts are not compressed: its bytes depend on nothing but the format. The
prune record is the second of a chain of which nothing else is frozen; FORMAT.md 8.3 shows it.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from deltachain.chain import tags
from deltachain.chain.chain import Chain, Committed
from deltachain.chain.plan import KnownEdges, window_from
from deltachain.chain.trust import SigningKey, Trust, TrustedKeys
from deltachain.codec import ENCODINGS, Change, Part, encode_part
from deltachain.codec.encodings.max.tiles import TileGrid
from deltachain.codec.encodings.max.tiles import bins as tile_bins
from deltachain.delta import ABSOLUTE, OldBits, TensorDelta, changes
from deltachain.format import documents
from deltachain.format.keys import PayloadKind, digest_key, payload_key, prune_key
from deltachain.store.memory import MemoryStore
from deltachain.types import Bits, StateDigest, TensorSpec
from tests.contract import reference
from tests.contract.reference_tiles import encode_tiles
from tests.format.forge import take_apart

HERE: Final = Path(__file__).parent
FOLDER: Final = HERE / "v1"
SIGNED: Final = HERE / "signed"
TAGS: Final = HERE / "v1_tags"
PRUNES: Final = HERE / "v1_prunes"

SPECS: Final = (
    TensorSpec("embed.weight", "BF16", (6, 5)),
    TensorSpec("norm.weight", "F32", (7,)),
    TensorSpec("router.scale", "F8_E4M3", (3, 3)),
    TensorSpec("steps", "I64", ()),
    TensorSpec("unused.weight", "F16", (0, 3)),
)
EMBED, NORM, ROUTER, STEPS, UNUSED = SPECS
LARGE: Final = TensorSpec("large.weight", "BF16", (1100, 1000))
TINY: Final = TensorSpec("w", "BF16", (2, 4))

Weights = dict[str, Bits]


def version(number: int) -> Weights:
    """Bits of all tensors in one of the four versions; the last differs from none."""
    embed = np.array([0x3C00 + 37 * i % 512 for i in range(30)], np.uint16)
    norm = np.array([0x3F800000 + 0x1001 * i for i in range(7)], np.uint32)
    router = np.array([16 * i + 3 for i in range(9)], np.uint8)
    steps = np.array([1000], np.uint64)
    embed[4], norm[5] = 0, 0x7FC00001  # +0.0, a NaN with a payload
    if number >= 1:
        embed[[0, 1, 4, 7, 29]] += np.array([1, 0xFFFF, 0x8000, 300, 0xFF80], np.uint16)
        norm[[0, 5]] += np.array([1, 0x1000000], np.uint32)
        router[[2, 8]] += np.array([0x80, 0xFE], np.uint8)
        steps += np.uint64(1)
    if number >= 2:
        embed[[1, 2]] += np.array([1, 2], np.uint16)
        norm ^= np.uint32(0x80000000)
        router[[2, 3]] += np.array([0x80, 0x7F], np.uint8)
        steps -= np.uint64(1002)  # wraps below zero
    bits: tuple[Bits, ...] = (embed, norm, router, steps, np.empty(0, np.uint16))
    return {spec.name: array for spec, array in zip(SPECS, bits, strict=True)}


def state(weights: Weights) -> StateDigest:
    parts = (reference.digest(digest_key(spec), weights[spec.name]) for spec in SPECS)
    return sum(parts, StateDigest())


def step(spec: TensorSpec, old: Bits, new: Bits) -> Change:
    delta = changes(spec, old, new)
    return Change(delta, change_of(spec, old, new))


def absolute(spec: TensorSpec, old: Bits, new: Bits) -> Change:
    indices = np.flatnonzero(old != new)
    delta = TensorDelta(spec=spec, indices=indices, values=new[indices], absolute=ABSOLUTE)
    return Change(delta, change_of(spec, old, new))


def as_max(spec: TensorSpec, old: Bits, new: Bits) -> Change:
    before, encoding = partial(OldBits, old), ENCODINGS.get("max")
    return Change(changes(spec, old, new), change_of(spec, old, new), encoding=encoding, old=before)


def change_of(spec: TensorSpec, old: Bits, new: Bits) -> StateDigest:
    indices, key = np.flatnonzero(old != new), digest_key(spec)
    after = reference.digest_at(key, indices, new[indices])
    return after - reference.digest_at(key, indices, old[indices])


def dense(spec: TensorSpec, new: Bits) -> Change:
    return Change(TensorDelta.dense(spec, new), reference.digest(digest_key(spec), new))


def tiny_change() -> Change:
    """Steps of +1, -1, +3 and 0x8000, at flat indices 0, 2, 3 and 7."""
    old = np.array([0x3F80, 0x4000, 0xBF80, 0x0001, 0x3F81, 0x3F82, 0x3F83, 0x0000], np.uint16)
    new = old.copy()
    new[[0, 2, 3, 7]] += np.array([1, 0xFFFF, 3, 0x8000], np.uint16)
    return step(TINY, old, new)


def large_change() -> Change:
    old = np.zeros(LARGE.numel, np.uint16)
    new = old.copy()
    new[[3, 65_538, 200_000, 1_048_575, 1_048_576, 1_099_999]] = [1, 2, 0xFFFF, 254, 255, 0x8000]
    return step(LARGE, old, new)


def parts() -> Iterator[tuple[str, bytes]]:
    old, new = version(0), version(2)
    some = [spec for spec in SPECS if not np.array_equal(old[spec.name], new[spec.name])]
    pairs = [(spec, old[spec.name], new[spec.name]) for spec in some]
    steps = [step(*pair) for pair in pairs]
    overwrites = [absolute(*pair) for pair in pairs]
    every = [dense(spec, new[spec.name]) for spec in SPECS]
    yield "tiny", encode_part([tiny_change()]).data
    yield "step", encode_part([*steps, large_change()]).data
    yield "overwrite", encode_part(overwrites).data
    yield "dense", encode_part(every).data
    yield "raw", encode_part(overwrites, raw=True).data
    yield "plain", encode_part(every, raw=True).data


def tiles_beside(cuts: int) -> "tuple[bytes, Weights]":
    spec = TensorSpec("w", "BF16", (8, 6))
    old = np.array([0x3C00 + 61 * n % 1024 for n in range(48)], np.uint16)
    new = old.copy()
    new[[0, 7, 8, 20, 47]] += np.array([1, 0xFFFF, 3, 0x8000, 40], np.uint16)
    indices = np.flatnonzero(new != old)
    pieces = take_apart(encode_part([as_max(spec, old, new)]).data)
    grid = TileGrid(6, cuts, 7, 255)
    table = np.full(512, 255, np.uint8)
    bins = np.unique(tile_bins(old, grid.shift, grid.mask)).astype(np.int64)
    table[bins], table[256 + bins] = 1 + bins % 3, 2 + bins % 2
    steps: Bits = new - old
    coded = encode_tiles(np.array([[0, 48]]), indices, steps[indices], old, table, grid)
    pieces.rows[0]["gap"] = cuts
    pieces.set_tile_nbytes(0, int(coded.nbytes[0]))
    pieces.streams |= {"#0.class": table.tobytes(), "#0.tile": coded.data.tobytes()}
    return pieces.build(), {"w": old}


def tiny_max() -> bytes:
    return encode_part([replace(tiny_change(), encoding=ENCODINGS.get("max"))]).data


def tiles() -> "Iterator[tuple[str, bytes, Weights]]":
    old, new = version(0), version(2)
    pairs = [(spec, old[spec.name], new[spec.name]) for spec in SPECS[:4]]
    yield "whole", encode_part(as_max(*pair) for pair in pairs).data, old
    changes = [step(*pair) for pair in pairs]
    alone = [replace(change, encoding=ENCODINGS.get("max")) for change in changes]
    yield "alone", encode_part(alone).data, old
    for cuts in (1, 2, 3):
        yield (f"beside{cuts}", *tiles_beside(cuts))


class Builder:
    def __init__(
        self,
        specs: Iterable[TensorSpec],
        aliases: Mapping[str, str],
        *,
        trust: Trust | None = None,
        chain_id: str = f"{7:032x}",
    ) -> None:
        self.store = MemoryStore()
        rows = tuple((s.name, s.dtype, s.shape) for s in specs)
        self.numel = sum(spec.numel for spec in specs)
        table = documents.Table(tensors=rows, aliases=dict(aliases))
        assets = {"config.json": b'{"model_type":"tiny"}'}
        self.chain = Chain.create(
            self.store, table, chain_id=chain_id, time=1700000000.5, assets=assets, trust=trust
        )
        self.parent: Committed | None = None
        self.added: list[documents.EdgeSummary] = []

    def put(
        self,
        kind: PayloadKind,
        base: int | None,
        number: int,
        items: Iterable[Change],
        *,
        raw: bool = False,
    ) -> documents.Edge:
        part = encode_part(items, raw=raw)
        key = payload_key(kind, number, 0, f"{number:032x}", 0)
        self.store.put(key, part.data)
        ref = documents.ObjectRef(
            key=key, nbytes=len(part.data), blake3=part.digest, directory=part.directory
        )
        return documents.Edge(kind=kind, base=base, encodings=part.encodings, parts=(ref,))

    def commit(
        self, number: int, edge: documents.Edge, reached: StateDigest, *, nnz: int, epoch: int = 0
    ) -> None:
        parent = self.parent
        manifest = documents.Manifest(
            chain=self.chain.identity.chain,
            version=number,
            epoch=epoch,
            commit_id=f"{number:032x}",
            parent=parent.digest if parent else "",
            step=10 * number if number else None,
            time=1700000000.0 + 0.25 * number,
            base_state=parent.manifest.state if parent else "",
            state=str(reached),
            nnz=nnz,
            numel=self.numel,
            edge=edge,
            recent=KnownEdges().after(parent.manifest, self.added).edges if parent else (),
            window_from=window_from(number),
            metadata={"run": "fixture"},
        )
        self.parent = self.chain.commit(manifest)
        self.added.clear()


def chain() -> Iterator[tuple[str, bytes]]:
    builder = Builder(SPECS, {"lm_head.weight": "embed.weight"})
    zero, one, two = version(0), version(1), version(2)
    by_step = [step(s, zero[s.name], one[s.name]) for s in SPECS[:4]]
    mixed = [
        absolute(EMBED, one[EMBED.name], two[EMBED.name]),
        dense(NORM, two[NORM.name]),
        *(step(s, one[s.name], two[s.name]) for s in (ROUTER, STEPS)),
    ]
    every = [dense(spec, zero[spec.name]) for spec in SPECS]
    builder.commit(0, builder.put("anchor", None, 0, every), state(zero), nnz=47)
    builder.commit(1, builder.put("delta", 0, 1, by_step), state(one), nnz=10)
    builder.commit(2, builder.put("delta", 1, 2, mixed), state(two), nnz=12)
    assert builder.parent is not None
    anchor = builder.put("anchor", None, 2, [dense(s, two[s.name]) for s in SPECS])
    skip = builder.put("skip", 0, 2, [step(s, zero[s.name], two[s.name]) for s in SPECS[:4]])
    base_states = {"anchor": "", "skip": str(state(zero))}
    builder.added = [
        builder.chain.add_edge(builder.parent, edge, base_states[edge.kind])
        for edge in (anchor, skip)
    ]
    anchors = builder.added[:1]
    builder.commit(3, documents.Edge(kind="delta", base=2), state(two), nnz=0, epoch=1)
    builder.chain.write_head(3, anchors)
    for info in builder.store.list():
        yield info.key, builder.store.get(info.key)


def contents(part: Part, old: Mapping[str, Bits] | None = None) -> dict[str, Any]:
    given = {name: OldBits(bits) for name, bits in (old or {}).items()}
    return {
        delta.spec.name: {
            "encoding": part.rows[delta.spec.name].encoding,
            "dtype": delta.spec.dtype,
            "shape": list(delta.spec.shape),
            "indices": None if delta.indices is None else delta.indices.tolist(),
            "values": delta.values.tobytes().hex(),
        }
        for delta in (part.read(name, old=given.get(name)) for name in part.rows)
    }


def expected(files: Mapping[str, bytes]) -> bytes:
    found = {name: contents(Part.from_bytes(files[name])) for name in files if "parts/" in name}
    versions = [
        {"state": str(state(w)), "weights": {name: w[name].tobytes().hex() for name in w}}
        for w in (version(number) for number in range(4))
    ]
    return json.dumps({"parts": found, "versions": versions}, indent=1).encode() + b"\n"


def max_files() -> Iterator[tuple[str, bytes]]:
    found = {}
    for name, data, old in tiles():
        rows = contents(Part.from_bytes(data), old)
        for tensor, row in rows.items():
            row["old"] = old[tensor].tobytes().hex()
        found[name] = rows
        yield f"{name}.safetensors", data
    yield "expected.json", json.dumps(found, indent=1).encode() + b"\n"


def build() -> dict[str, bytes]:
    files = {f"parts/{name}.safetensors": data for name, data in parts()}
    files |= {f"chain/{key}": data for key, data in chain()}
    files |= {"expected.json": expected(files)}
    return files | {f"max/{name}": data for name, data in max_files()}


KEY: Final = SigningKey.of(bytes(range(32)))
OWNER: Final = Trust(key=KEY, trusted=TrustedKeys((KEY.public,)))


def signed_version(number: int) -> Bits:
    bits = np.arange(0x3F80, 0x3F88, dtype=np.uint16)
    if number >= 1:
        bits[[0, 5]] += np.array([1, 0xFFFF], np.uint16)
    return bits


def signed_chain() -> dict[str, bytes]:
    builder = Builder([TINY], {}, trust=Trust())
    zero, one = signed_version(0), signed_version(1)
    states = [reference.digest(digest_key(TINY), bits) for bits in (zero, one)]
    first = builder.put("anchor", None, 0, [dense(TINY, zero)], raw=True)
    builder.commit(0, first, states[0], nnz=TINY.numel)
    builder.chain = Chain.open(builder.store, OWNER.unchecked())
    for key, data in builder.chain.sign_identity().items():
        builder.store.put(key, data)
    delta = builder.put("delta", 0, 1, [absolute(TINY, zero, one)], raw=True)
    builder.commit(1, delta, states[1], nnz=2)
    assert builder.parent is not None
    anchor = builder.put("anchor", None, 1, [dense(TINY, one)], raw=True)
    builder.added = [builder.chain.add_edge(builder.parent, anchor, "")]
    builder.commit(2, documents.Edge(kind="delta", base=1), states[1], nnz=0, epoch=1)
    return {info.key: builder.store.get(info.key) for info in builder.store.list()}


def store_of(files: Mapping[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    for key, data in files.items():
        store.put(key, data)
    return store


def tag_records() -> dict[str, bytes]:
    """Records that name versions of the frozen chain in ``v1/``."""
    time, found = 1700000100.25, Chain.open(store_of(frozen(FOLDER / "chain")))
    tags.set_(found, "best", found.read(1), time=time)
    tags.set_(found, "best", found.read(3), time=time + 1)
    tags.set_(found, "eval-step-10", found.read(1), time=time + 2)
    tags.remove(found, "eval-step-10", time=time + 3)
    return {info.key: found.store.get(info.key) for info in found.store.list("tags/")}


PRUNE_RECORD: Final = documents.PruneRecord(
    chain="00000000000000000000000000000007",
    number=1,
    head=1040,
    maintainer="00000000000000000000000000000009",
    time=1700000000.5,
    pruned=(
        documents.PrunedRange(kind="anchor", span=0, first=0, last=0, after=1700000000.25),
        documents.PrunedRange(kind="delta", span=1, first=1, last=8, after=1700000000.25),
        documents.PrunedRange(kind="delta", span=1, first=9, last=15, after=1700003600.5),
        documents.PrunedRange(kind="skip", span=8, first=8, last=16, after=1700003600.5),
    ),
)

FROZEN: Final[Mapping[Path, Callable[[], dict[str, bytes]]]] = {
    FOLDER: build,
    SIGNED: signed_chain,
    TAGS: tag_records,
    PRUNES: lambda: {prune_key(PRUNE_RECORD.number): documents.seal(PRUNE_RECORD)},
}


def frozen(folder: Path) -> dict[str, bytes]:
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True)  # what is frozen stays: an existing folder is an error
    for name, data in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


if __name__ == "__main__":
    write(HERE / sys.argv[1], FROZEN[HERE / sys.argv[1]]())
