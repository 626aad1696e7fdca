"""What every reader must survive: bytes go in, and nothing but a typed error may come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import numpy as np

from deltachain.chain import tags
from deltachain.chain.chain import Chain
from deltachain.chain.fetch import fetch
from deltachain.chain.plan import Plan
from deltachain.codec import ENCODINGS, Part
from deltachain.delta import OldBits, TensorDelta, fold
from deltachain.errors import (
    BrokenChainError,
    ChainMismatchError,
    ConfigError,
    ForkedChainError,
    FormatError,
    MalformedError,
    ObjectNotFoundError,
    StoreWentBackError,
)
from deltachain.format import keys
from deltachain.format.documents import (
    Document,
    EdgeRecord,
    EdgeSummary,
    Head,
    Identity,
    Manifest,
    Table,
    Tag,
    dump,
    parse,
    seal,
    unseal,
)
from deltachain.format.keys import digest_key, object_digest
from deltachain.kernels import host
from deltachain.store import MemoryStore
from deltachain.subscribe.targets.patch import WholeTensor, prepare, prepare_steps
from deltachain.types import MAX_NUMEL, Bits, TensorSpec
from tests.format import freeze_tags, stranger
from tests.format.freeze import chain

Target = Callable[[bytes], None]

_D = TypeVar("_D", bound=Document)

FROZEN: Final = dict(chain()) | freeze_tags.build()

MANIFEST_KEY: Final = keys.manifest_key(3)
RECORD_KEY: Final = keys.edge_key(2, "skip", 0)
TAG_KEY: Final = keys.tag_key("best", 1)
MAX_OLD: Final = 1 << 14
COMPARED_NNZ: Final = 1 << 12


class FindingError(Exception):
    """A reader accepted what it must not, or raised what it must not."""


REFUSALS: Final = (
    FormatError,
    BrokenChainError,
    ChainMismatchError,
    ForkedChainError,
    StoreWentBackError,
)


@contextmanager
def refusing() -> Iterator[None]:
    try:
        yield
    except ObjectNotFoundError:
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
        raise MalformedError("a tensor that is too large for the fuzzer")
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


def check_stage(part: Part, delta: TensorDelta) -> None:
    spec = delta.spec
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
        manifest = unseal(data, Manifest, key=MANIFEST_KEY)
        must(unseal(seal(manifest), Manifest, key="again") == manifest, "another manifest")
    follow_(stored({MANIFEST_KEY: data}))


def read_record(data: bytes) -> None:
    record = None
    with refusing():
        record = unseal(data, EdgeRecord, key=RECORD_KEY)
        must(unseal(seal(record), EdgeRecord, key="again") == record, "another record")
    store = stored({RECORD_KEY: data})
    newest = unseal(FROZEN[MANIFEST_KEY], Manifest, key=MANIFEST_KEY)
    with refusing():
        opened = Chain.open(store)
        (listed,) = (edge for edge in newest.recent if edge.record == RECORD_KEY)
        opened.edge(relisted(listed, object_digest(data)))
        must(record is not None, "an edge of a record that cannot be read")
    with refusing():
        opened = Chain.open(store)
        committed = opened.read(2)
        edge = unseal(FROZEN[RECORD_KEY], EdgeRecord, key=RECORD_KEY).edge
        opened.add_edge(committed, edge, "")


def relisted(listed: EdgeSummary, digest: str) -> EdgeSummary:
    fields = {name: getattr(listed, name) for name in listed.__struct_fields__}
    return EdgeSummary(**fields | {"digest": digest})


def read_table(data: bytes) -> None:
    with refusing():
        check_table(reparsed(data, Table))
    identity = parse(FROZEN[keys.CHAIN_KEY], Identity, key=keys.CHAIN_KEY)
    mine = Identity(chain=identity.chain, created=identity.created, table=object_digest(data))
    store = stored({keys.TABLE_KEY: data, keys.CHAIN_KEY: dump(mine)})
    with refusing():
        check_table(Chain.open(store).table)
    follow_(store)


def check_table(table: Table) -> None:
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
        reparsed(data, Identity)
    store = stored({keys.CHAIN_KEY: data})
    with refusing():
        for name, _ in Chain.open(store).assets():
            must(name and "/" not in name and not name.startswith("."), f"a file {name!r}")
    follow_(store)


def read_tag(data: bytes) -> None:
    with refusing():
        record = unseal(data, Tag, key=TAG_KEY)
        must(unseal(seal(record), Tag, key="again") == record, "another record")
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
        reparsed(data, Head)
    store = stored({keys.HEAD_KEY: data})
    head = Chain.open(store).head()
    must(head is not None and head.version == 3, "a hint was believed")
    follow_(store)


def reparsed(data: bytes, kind: type[_D]) -> _D:
    document = parse(data, kind, key="document")
    must(parse(dump(document), kind, key="again") == document, "another document")
    return document


def stored(forged: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    for key, data in (FROZEN | forged).items():
        store.put(key, data)
    return store


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
    except ConfigError:
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
