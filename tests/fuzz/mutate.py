"""Changes that reach the rules behind the digests: to pieces, one piece altered, sealed again."""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from random import Random
from typing import Any, Final, TypeVar

import numpy as np
import torch
import zstandard
from msgspec import structs

from deltachain import errors
from deltachain.chain import tags
from deltachain.chain.chain import Chain
from deltachain.chain.plan import Plan
from deltachain.codec import ENCODINGS, Change, Part, encode_part
from deltachain.delta import OldBits, TensorDelta, changes, fold
from deltachain.format import documents, keys
from deltachain.format.keys import digest_key, object_digest
from deltachain.kernels import host
from deltachain.replica.batches import BATCHED, HostStager
from deltachain.replica.placements import Placement
from deltachain.store import MemoryStore
from deltachain.subscribe.targets.base import write_all
from deltachain.subscribe.targets.tensor_patch import WholeTensor, prepare, prepare_steps
from deltachain.types import MAX_NUMEL, WIRE_DTYPES, Bits, StateDigest, TensorSpec
from tests.format import stranger
from tests.format.forge import FRAME, Forgery, dumps, enveloped, take_apart
from tests.format.forgeries import FORGERIES, PARTS, forged
from tests.format.freeze import absolute, as_max, chain, dense, parts, step, store_of, tag_records
from tests.format.test_stranger import part_of as max_part
from tests.hostile.corpus import CORPUS
from tests.hostile.scene import Scene
from tests.support.fetch import fetch

Target = Callable[[bytes], None]

_D = TypeVar("_D", bound=documents.Document)

FROZEN: Final = dict(chain()) | tag_records()

MANIFEST_KEY: Final = keys.manifest_key(3)
RECORD_KEY: Final = keys.edge_key(2, "skip", 0)
TAG_KEY: Final = keys.tag_key("best", 1)
MAX_OLD: Final = 1 << 14
COMPARED_NNZ: Final = 1 << 12


class FindingError(Exception):
    """A reader accepted what it must not, or raised what it must not."""


REFUSALS: Final = (
    errors.FormatError,
    errors.BrokenChainError,
    errors.ChainMismatchError,
    errors.ForkedChainError,
    errors.StoreWentBackError,
)


@contextmanager
def refusing() -> Iterator[None]:
    try:
        yield
    except errors.ObjectNotFoundError:
        pass
    except REFUSALS as exc:
        if not exc.args[0] or not exc.hint:
            raise FindingError("an error that says nothing") from exc


def must(fits: object, what: str) -> None:
    if not fits:
        raise FindingError(what)


def read_part(data: bytes) -> None:
    with refusing():
        part = Part.from_bytes(data, key="part")
        part.verify()
        deltas = [read_tensor(part, name) for name in part.rows]
        for delta in deltas:
            check_delta(delta)
            check_stage(part, delta)
        if part.nnz <= COMPARED_NNZ:
            compare_with_stranger(data, deltas)


def old_of(spec: TensorSpec) -> Bits:
    count = min(spec.numel, MAX_OLD)
    bits: Bits = (np.arange(count) * 61 % 1024 + 0x3C00).astype(spec.bits_dtype)
    return bits


def read_tensor(part: Part, name: str) -> TensorDelta:
    spec = part.rows[name].spec
    if not part.needs_old(name):
        return part.read(name)
    if spec.numel > MAX_OLD:
        raise errors.MalformedError("a tensor that is too large for the fuzzer")
    delta = part.read(name, old=OldBits(old_of(spec)))
    return delta.validate()


def check_delta(delta: TensorDelta) -> None:
    spec, indices = delta.spec, delta.indices
    must(0 <= delta.nnz <= spec.numel <= MAX_NUMEL, "more elements than the tensor has")
    must(delta.values.dtype == spec.bits_dtype, "values of another width")
    if indices is not None:
        must(bool(np.all(np.diff(indices) > 0)), "indices do not ascend")
        must(not indices.size or 0 <= indices[0] <= indices[-1] < spec.numel, "an index outside")
        host.digest_at(digest_key(spec), indices, delta.values)
    twice = fold(delta, delta).validate()
    must(twice.nnz <= delta.nnz, "folding invented elements")


def check_batch(part: Part, delta: TensorDelta) -> None:
    spec, live = delta.spec, old_of(delta.spec)
    signed = torch.from_numpy(live if live.itemsize == 1 else live.view(f"<i{live.itemsize}"))
    stager = HostStager({spec.name: [(("", 0), Placement(signed, 0, (1,)))]}, {spec.name: spec})
    before = StateDigest()
    for group in stager.groups([(0, part)])[0]:
        try:
            writes, effects = stager.stage(group)
        except REFUSALS as exc:
            raise FindingError("what is read is not staged together") from exc
        write_all(writes, 1)
        before = sum((effect.change for effect in effects.values()), before)
    expected = prepare(WholeTensor(old_of(spec)), delta)
    must(before == expected.change, "staged together with another effect")
    after = old_of(spec)
    after[np.asarray(expected.indices)] = np.asarray(expected.new)
    must(np.array_equal(live, after), "bits written together differ")


def check_stage(part: Part, delta: TensorDelta) -> None:
    spec = delta.spec
    if part.rows[spec.name].encoding in BATCHED and 0 < spec.numel <= MAX_OLD:
        check_batch(part, delta)
    if not ENCODINGS.get(part.rows[spec.name].encoding).stages or spec.numel > MAX_OLD:
        return
    live = WholeTensor(old_of(spec))
    reader = part.reader(spec.name, old=OldBits(old_of(spec)))
    try:
        found = prepare_steps(live, reader)
    except REFUSALS as exc:
        raise FindingError("what is read is not staged") from exc
    expected = prepare(live, delta)
    must(found.change == expected.change, "staged with another effect")
    order = np.argsort(np.asarray(found.indices))
    for field in ("indices", "old", "new"):
        one, other = np.asarray(getattr(found, field)), getattr(expected, field)
        must(np.array_equal(one[order], other), f"{field} of a patch differ")


def compare_with_stranger(data: bytes, deltas: list[TensorDelta]) -> None:
    old = {delta.spec.name: old_of(delta.spec).tolist() for delta in deltas}
    theirs = stranger.read_part(data, old)
    must(list(theirs) == [delta.spec.name for delta in deltas], "other tensors")
    for delta in deltas:
        must(theirs[delta.spec.name].values == delta.values.tolist(), "other values")


def read_manifest(data: bytes) -> None:
    with refusing():
        unsealed(data, documents.Manifest, MANIFEST_KEY)
    follow_(stored({MANIFEST_KEY: data}))


def read_record(data: bytes) -> None:
    record = None
    with refusing():
        record = unsealed(data, documents.EdgeRecord, RECORD_KEY)
    store = stored({RECORD_KEY: data})
    newest = documents.unseal(FROZEN[MANIFEST_KEY], documents.Manifest, key=MANIFEST_KEY)
    with refusing():
        opened = Chain.open(store)
        (listed,) = (edge for edge in newest.recent if edge.record == RECORD_KEY)
        opened.edge(structs.replace(listed, digest=object_digest(data)))
        must(record is not None, "an edge of a record that cannot be read")
    with refusing():
        opened = Chain.open(store)
        committed = opened.read(2)
        edge = documents.unseal(FROZEN[RECORD_KEY], documents.EdgeRecord, key=RECORD_KEY).edge
        opened.add_edge(committed, edge, "")


def read_table(data: bytes) -> None:
    with refusing():
        check_table(reparsed(data, documents.Table))
    identity = documents.parse(FROZEN[keys.CHAIN_KEY], documents.Identity, key=keys.CHAIN_KEY)
    mine = structs.replace(identity, table=object_digest(data), assets=())
    store = stored({keys.TABLE_KEY: data, keys.CHAIN_KEY: documents.dump(mine)})
    with refusing():
        check_table(Chain.open(store).table)
    follow_(store)


def check_table(table: documents.Table) -> None:
    try:
        specs = table.specs()
    except ValueError:  # ConfigError, which opening a chain turns into MalformedError
        return
    must(len({spec.name for spec in specs}) == len(specs), "a name twice")
    for spec in specs:
        must(0 <= spec.numel <= MAX_NUMEL, "a tensor out of range")
        digest_key(spec)


def read_chain(data: bytes) -> None:
    with refusing():
        reparsed(data, documents.Identity)
    store = stored({keys.CHAIN_KEY: data})
    with refusing():
        for name, _ in Chain.open(store).assets():
            must(name and "/" not in name and not name.startswith("."), f"a file {name!r}")
    follow_(store)


def read_tag(data: bytes) -> None:
    with refusing():
        unsealed(data, documents.Tag, TAG_KEY)
    opened = Chain.open(stored({TAG_KEY: data}))
    with refusing():
        tag = tags.read(opened, "best")
        if tag is not None:
            must(tag.version == tags.committed(opened, tag).version, "another version")
    with refusing():
        must(len(tags.read_all(opened)) <= 1, "a tag that was removed")


def read_head(data: bytes) -> None:
    """Follow a chain with this hint: whatever it says, the head is the head."""
    with refusing():
        reparsed(data, documents.Head)
    store = stored({keys.HEAD_KEY: data})
    head = Chain.open(store).head()
    must(head is not None and head.version == 3, "a hint was believed")
    follow_(store)


def reparsed(data: bytes, kind: type[_D]) -> _D:
    document = documents.parse(data, kind, key="document")
    must(
        documents.parse(documents.dump(document), kind, key="again") == document, "another document"
    )
    return document


def unsealed(data: bytes, kind: type[_D], key: str) -> _D:
    document = documents.unseal(data, kind, key=key)
    must(
        documents.unseal(documents.seal(document), kind, key="again") == document,
        "another document",
    )
    return document


def stored(forged: dict[str, bytes]) -> MemoryStore:
    return store_of(FROZEN | forged)


def follow_(store: MemoryStore) -> None:
    with refusing():
        opened = Chain.open(store)
        head = opened.head()
        if head is None:
            return
        for held in (None, 0, 1, 2):
            with refusing():
                plan = opened.plan(held, head)
                take(opened, plan)


def take(opened: Chain, plan: Plan) -> None:
    try:
        fetched = fetch(opened, plan)
    except errors.ConfigError:
        must(any(edge.kind == "base" for edge in plan.edges), "a wrong argument of nobody")
        return
    for name in fetched.names:
        must(fetched.read(name).spec == fetched.specs[name], "another tensor")


TARGETS: Final[dict[str, Target]] = {
    "part": read_part,
    "manifest": read_manifest,
    "record": read_record,
    "table": read_table,
    "chain": read_chain,
    "head": read_head,
    "tag": read_tag,
}


KEYS: Final = {
    "manifest": MANIFEST_KEY,
    "record": RECORD_KEY,
    "table": keys.TABLE_KEY,
    "chain": keys.CHAIN_KEY,
    "head": keys.HEAD_KEY,
    "tag": TAG_KEY,
}


LAYER: Final = {"a": "BF16", "b": "F8_E4M3", "c": "BF16", "d": "F32"}


def max_of(*specs: TensorSpec, alone: bool = False) -> bytes:
    def change_of(spec: TensorSpec) -> Change:
        old = old_of(spec)
        new = old.copy()
        new[::7] += np.array(1, spec.bits_dtype)
        before = None if alone else partial(OldBits, old)
        steps, encoding = changes(spec, old, new), ENCODINGS.get("max")
        return Change(steps, StateDigest(), encoding=encoding, old=before)

    return encode_part(map(change_of, specs)).data


def seeds(target: str) -> Iterator[tuple[str, bytes]]:
    if target == "part":
        for name, data in (*PARTS.items(), *parts()):
            yield f"sound-{name}", data
        for cuts in (1, 2, 3, 6):
            yield f"sound-max-{cuts}", max_part(cuts)
        for dtype in ("F8_E4M3", "BF16", "F32", "F64"):
            yield f"sound-max-{dtype}", max_of(TensorSpec("w", dtype, (40,)))
            yield f"sound-alone-{dtype}", max_of(TensorSpec("w", dtype, (5, 8)), alone=True)
        layer = [TensorSpec(f"h.0.{name}", dtype, (20,)) for name, dtype in LAYER.items()]
        yield "sound-max-layer", max_of(*layer)  # they share a digest
        for number, name in enumerate(FORGERIES):
            yield f"forged-{number:03}", forged(name)
        return
    yield "sound", FROZEN[KEYS[target]]
    cases = (case for case in CORPUS if case.level == target)
    for number, case in enumerate(cases):
        scene = Scene(case.scene)
        case.act(scene)
        yield f"hostile-{number:03}", scene.read(target)


LARGE: Final = ((1 << 20) + 5,)

Mutate = Callable[[bytes, int], bytes]

Mutator = Callable[[bytes, int, Random, Mutate], bytes]

NUMBERS: Final = (
    *(-1, 0, 1, 2, 3, 7, 8, 9, 254, 255, 256, 65_534, 65_535, 65_536, (1 << 20) - 1, 1 << 20),
    *((1 << 20) + 1, (1 << 31) - 1, 1 << 31, 1 << 48, (1 << 48) + 1, (1 << 63) - 1, 1 << 63),
    *(1 << 64, 10**30, 10**4300),
)
WORDS: Final = (
    *("", "w", "x.weight", "../w", "/etc/passwd", "directory", "digest", "__metadata__", "#0.sign"),
    *("step", "overwrite", "dense", "raw", "plain", "max", "later"),
    *("zstd", "none", "lz4", "\0", "é", "٣"),
    *("delta", "anchor", "skip", "base", "0" * 32, "f" * 64, "a" * 5000, "w.values", "1", "01"),
    *WIRE_DTYPES,
)
OTHERS: Final[tuple[Any, ...]] = (None, True, 1.5, 1e308, [], {}, [None], {"x": None}, [[]])
TORN: Final = (
    *(ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, MemoryError),
    *(RecursionError, zstandard.ZstdError),
)
"""What taking nonsense to pieces raises."""


def mutate_part(data: bytes, limit: int, rng: Random, mutate: Mutate) -> bytes:
    for _ in range(4 if rng.random() < 0.95 else 0):  # not every edit fits every part
        try:
            forgery = take_apart(random_part(rng.randrange(256)) if rng.random() < 0.1 else data)
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                rng.choice(EDITS)(forgery, rng, mutate)
            built = forgery.build()
        except TORN:
            continue
        if len(built) <= limit:
            return built
    return mutate(data, limit)


@cache  # encoding takes longer than all else here
def random_part(seed: int) -> bytes:
    rng, numbers = Random(seed), np.random.default_rng(seed)
    raw = rng.random() < 0.3
    changes = []
    for number in range(rng.randint(1, 4)):
        shape = rng.choice([(), (0, 3), (1,), (5, 7), (300,), (10_000,), LARGE])
        dtype = "U8" if shape == LARGE else rng.choice(list(WIRE_DTYPES))
        spec = TensorSpec(f"h.{number // 2}.t{number}", dtype, shape)
        is_max = not raw and spec.numel <= MAX_OLD and rng.random() < 0.5
        old = numbers.integers(0, 256, spec.nbytes, np.uint8).view(spec.bits_dtype)
        old = old_of(spec) if is_max else old
        new = old.copy()
        where = numbers.random(old.size) < rng.choice((0.0005, 0.02, 1.0))
        new[where] += numbers.choice(np.array([1, 2, 255, 254]), int(where.sum())).astype(old.dtype)
        makers = (lambda s, _, n: dense(s, n), absolute) if raw or rng.random() < 0.5 else (step,)
        changes.append(as_max(spec, old, new) if is_max else rng.choice(makers)(spec, old, new))
    return encode_part(changes, raw=raw).data


def edit_row(f: Forgery, rng: Random, _: Mutate) -> None:
    edit_json(rng.choice(f.rows), rng)


def edit_rows(f: Forgery, rng: Random, _: Mutate) -> None:
    at, to, what = rng.randrange(len(f.rows)), rng.randint(0, len(f.rows)), rng.randrange(3)
    names = f.names()
    if what == 0:
        f.rows.insert(to, copy.deepcopy(f.rows[at]))
        names.insert(to, rng.choice(WORDS))
    elif what == 1:
        del f.rows[at], names[at]
    else:
        order = rng.sample(range(len(f.rows)), len(f.rows))
        f.rows[:], names = [f.rows[n] for n in order], [names[n] for n in order]
    if rng.random() < 0.8:  # else the stored names are those of other neighbours
        f.set_names(names)


def edit_name(f: Forgery, rng: Random, _: Mutate) -> None:
    row = rng.choice(f.rows)
    if rng.random() < 0.5:
        names = f.names()
        names[rng.randrange(len(names))] = rng.choice((*WORDS, rng.choice(names) + "x"))
        f.set_names(names)
    else:
        shared, colon, rest = row["name"].partition(":")
        row["name"] = f"{number(int(shared), rng)}{colon}{rest}"


def edit_segments(f: Forgery, rng: Random, _: Mutate) -> None:
    column = rng.choice(list(f.segments.values()))
    what = rng.randrange(4)
    at = rng.randrange(len(column))
    if what == 0:
        column[at] = number(column[at], rng)
    elif what == 1:
        for values in f.segments.values():
            values.insert(at, values[at])
        rng.choice(f.rows)["segments"] += 1
    elif what == 2:
        for values in f.segments.values():
            del values[at]
    else:
        column.append(rng.choice(NUMBERS))


def split_segment(f: Forgery, rng: Random, _: Mutate) -> None:
    """A dense segment becomes two, which changes nothing that is decoded."""
    columns = f.segments
    at = rng.randrange(len(columns["length"]))
    length = columns["length"][at]
    cut = rng.randint(1, length - 1)
    for name in ("length", "nnz"):
        columns[name][at : at + 1] = [cut, length - cut]
    columns["start"].insert(at + 1, columns["start"][at] + cut)
    for name in ("gaps", "exceptions", "wide"):
        columns[name].insert(at + 1, 0)
    rng.choice(f.rows)["segments"] += 1


def edit_stream(f: Forgery, rng: Random, mutate: Mutate) -> None:
    name = rng.choice(list(f.streams))
    data = f.streams[name]
    if rng.random() < 0.5:
        f.streams[name] = mutate(data, len(data) + 16)
    elif data:  # of the same length: gets past the sizes
        changed = bytearray(data)
        changed[rng.randrange(len(data))] = rng.choice((0, 1, 2, 127, 128, 254, 255))
        f.streams[name] = bytes(changed)


def edit_streams(f: Forgery, rng: Random, _: Mutate) -> None:
    name = rng.choice(list(f.streams))
    other = rng.choice([*f.streams, *WORDS, name.replace("#0", "#1")])
    data = f.streams.pop(name) if rng.random() < 0.7 else f.streams[name]
    if rng.random() < 0.7:
        f.streams[other] = data


def edit_metadata(f: Forgery, rng: Random, _: Mutate) -> None:
    name = rng.choice(("deltachain", "compression", "directory_nbytes", "other"))
    if rng.random() < 0.3:
        f.metadata["compression"] = rng.choice(("zstd", "none"))
    else:
        f.claims[name] = rng.choice((*WORDS, str(rng.choice(NUMBERS[:-1]))))


def edit_directory(f: Forgery, rng: Random, mutate: Mutate) -> None:
    if rng.random() < 0.85:
        f.on_directory = lambda document: edit_json(document["streams"], rng)
    else:
        f.on_document = lambda document: mutate(document, len(document) + 64)


def edit_header(f: Forgery, rng: Random, mutate: Mutate) -> None:
    if rng.random() < 0.85:
        f.on_header = lambda header: edit_json(header, rng)
    else:
        f.on_front = lambda header: mutate(header, len(header) + 64)


def edit_frames(f: Forgery, rng: Random, mutate: Mutate) -> None:
    what = rng.randrange(3)
    if what == 0:
        f.on_frame = lambda frame: mutate(frame, len(frame) + 16)
    elif what == 1:
        f.on_stored = lambda stored: mutate(stored, len(stored) + 16)
    else:
        longest = max(map(len, f.streams.values()))
        f.frame_nbytes = max(rng.choice((1, 2, 3, 5, 16, FRAME, 2 * FRAME)), longest // 64)


EDITS: Final = (
    *(edit_row, edit_row, edit_rows, edit_name, edit_segments, edit_segments, split_segment),
    *(edit_stream, edit_stream, edit_streams, edit_metadata, edit_directory, edit_header),
    edit_frames,
)


def number(value: int, rng: Random) -> int:
    return value + rng.choice((-1, 1)) if rng.random() < 0.5 else rng.choice(NUMBERS)


def edit_json(content: Any, rng: Random) -> None:
    inner = content
    while isinstance(inner, (list, dict)) and inner:
        place = rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        deeper = inner[place]
        if not isinstance(deeper, (list, dict)) or not deeper or rng.random() < 0.2:
            edit_place(inner, place, rng)
            return
        inner = deeper


def edit_place(inner: Any, place: Any, rng: Random) -> None:
    value = inner[place]
    what = rng.randrange(8)
    if what == 0:
        del inner[place]
    elif what == 1 and isinstance(inner, list):
        inner.insert(place, copy.deepcopy(value))
    elif what == 1:
        inner[rng.choice(WORDS)] = value
    elif what == 2:
        inner[place] = copy.deepcopy(rng.choice(OTHERS))
    elif what == 3:
        inner[place] = rng.choice(WORDS)
    else:
        inner[place] = alike(value, rng)


def alike(value: Any, rng: Random) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return number(value, rng)
    if isinstance(value, str):
        at = rng.randint(0, len(value))
        return rng.choice((value[:at], value[at:] + value[:at], value + value, rng.choice(WORDS)))
    if isinstance(value, list):
        return rng.choice((value + value, value[::-1], value[1:]))
    return rng.choice((*OTHERS, 0, -1, 1e-300))


def mutate_document(data: bytes, limit: int, rng: Random, mutate: Mutate) -> bytes:
    if rng.random() < 0.1:
        return mutate(data, limit)
    try:
        content = json.loads(data)
        for _ in range(rng.choice((1, 1, 2, 3))):
            edit_json(content, rng)
        built = dumps(content)
    except TORN:
        return mutate(data, limit)
    return built if len(built) <= limit else mutate(data, limit)


def mutate_envelope(data: bytes, limit: int, rng: Random, mutate: Mutate) -> bytes:
    if rng.random() < 0.1:
        return mutate(data, limit)
    head, tail = b'{"blake3":"' + b"0" * 64 + b'","payload":', b',"signatures":[]}'
    return enveloped(mutate_document(data[len(head) : -len(tail)], limit - 200, rng, mutate))


MUTATORS: Final[dict[str, Mutator]] = {
    "part": mutate_part,
    "manifest": mutate_envelope,
    "record": mutate_envelope,
    "table": mutate_document,
    "chain": mutate_document,
    "head": mutate_document,
    "tag": mutate_envelope,
}
