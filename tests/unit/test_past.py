"""What is read of a long chain: by whoever joins it, and by whoever comes back after long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest

from deltachain.chain.ancestry import PLAN_WINDOWS
from deltachain.chain.chain import Chain, Committed
from deltachain.chain.plan import listed_edges
from deltachain.errors import BrokenChainError
from deltachain.format.documents import Edge, EdgeSummary, Head, ObjectRef, dump, seal, summarise
from deltachain.format.keys import HEAD_KEY, manifest_key
from deltachain.store import MemoryStore, ObjectInfo
from deltachain.types import StateDigest
from tests.support.faults import FaultyStore
from tests.support.values import present
from tests.unit.manifest_chains import ANCHOR, WideStore, create, extend, manifest_after

LONG = 20_000
EVERY = 24
"""Versions between two anchors of the long chain."""

MOST = 60
"""Documents that joining or catching up may read, however long the chain is."""


def part(kind: str, version: int, nbytes: int) -> ObjectRef:
    key = f"{kind}s/{version:020d}-00000000-{'a' * 32}/00000.safetensors"
    return ObjectRef(key=key, nbytes=nbytes, blake3="0" * 64)


def grow(store: MemoryStore, count: int, *, anchor: int, delta: int, every: int = EVERY) -> None:
    """A chain of that many versions, with an anchor now and then; sizes in bytes."""
    create(store)
    parent: Committed | None = None
    added: list[EdgeSummary] = []
    for version in range(count):
        parts = (part("delta", version, delta),)
        own = Edge(kind="delta", base=version - 1, encodings=("step",), parts=parts)
        manifest = manifest_after(
            parent,
            edge=own if parent else ANCHOR,
            recent=listed_edges(parent.manifest if parent else None, added),
        )
        data = seal(manifest)
        store.put(manifest_key(version), data)
        parent, added = Committed(manifest, ""), []
        if version and version % every == 0:
            edge = Edge(
                kind="anchor", encodings=("dense",), parts=(part("anchor", version, anchor),)
            )
            added = [summarise(version, edge, manifest.state, record="edges/a", digest="0" * 64)]
    store.put(HEAD_KEY, dump(Head(version=(count - 1) // 8 * 8)))


class Counting(FaultyStore):
    """Counts what is asked for: documents that are read, and looks at some."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.reads: list[str] = []
        self.looks = 0

    def get(self, key: str, **limits: Any) -> bytes:
        self.reads.append(key)
        return super().get(key, **limits)

    def read(self, key: str, *, nbytes: int, pin: str = "") -> Any:
        self.reads.append(key)
        return super().read(key, nbytes=nbytes, pin=pin)

    def find(self, key: str) -> ObjectInfo | None:
        self.looks += 1
        return super().find(key)

    def find_all(self, keys: Iterable[str]) -> Mapping[str, ObjectInfo]:
        if self.inner.capabilities.probes == 1:
            return super().find_all(keys)
        self.looks += 1
        return self.inner.find_all(keys)


@pytest.fixture(scope="module")
def long_chain() -> MemoryStore:
    store = MemoryStore()
    grow(store, LONG, anchor=40 << 20, delta=1 << 20)
    return store


@pytest.fixture(params=[MemoryStore, WideStore], ids=["narrow", "wide"])
def counting(long_chain: MemoryStore, request: pytest.FixtureRequest) -> Counting:
    store: MemoryStore = request.param()
    store._objects = long_chain._objects
    return Counting(store)


def read_edges(chain: Chain, edges: Iterable[EdgeSummary]) -> None:
    """What a fetch asks for besides parts: the manifest of each version on the way."""
    for edge in edges:
        chain.read(edge.version)


def test_a_newcomer_with_unknown_bits_reads_few_documents(counting: Counting) -> None:
    chain = Chain.open(counting)
    assert chain.find_state(StateDigest(1, 1)) is None
    head = present(chain.head())
    assert head.version == LONG - 1
    plan = chain.plan(None, head)
    assert plan.edges[0].base is None
    assert LONG - plan.edges[0].version <= EVERY
    read_edges(chain, plan.edges)
    assert len(counting.reads) + counting.looks <= MOST


@pytest.mark.parametrize("held", [0, LONG - 19_000, LONG - 300])
def test_a_follower_far_behind_reads_few_documents(counting: Counting, held: int) -> None:
    chain = Chain.open(counting)
    assert chain.newest(held) == LONG - 1
    head = chain.read(LONG - 1)
    plan = chain.plan(held, head)
    assert plan.edges[0].base is None
    read_edges(chain, plan.edges)
    assert len(counting.reads) <= MOST
    assert counting.looks <= MOST


def test_who_is_a_little_behind_follows_deltas(counting: Counting) -> None:
    chain = Chain.open(counting)
    plan = chain.plan(LONG - 20, chain.read(LONG - 1))
    assert [edge.version for edge in plan.edges] == list(range(LONG - 19, LONG))


def test_the_newest_and_the_first_states_are_known(counting: Counting) -> None:
    chain = Chain.open(counting)
    for version in (0, LONG - 40, LONG - 1):
        committed = chain.read(version)
        assert chain.find_state(committed.state) == committed


def test_a_cheaper_way_is_looked_for_where_the_anchor_is_dear() -> None:
    store = MemoryStore()
    grow(store, 600, anchor=1 << 30, delta=1 << 10, every=100)
    chain = Chain.open(store)
    head = chain.read(599)
    near, far = chain.plan(300, head), chain.plan(10, head)
    assert [edge.version for edge in near.edges] == list(range(301, 600))
    assert far.edges[0].base is None  # further back than is worth reading
    assert 16 * PLAN_WINDOWS < 599 - 10


def test_a_past_that_is_gone_is_not_needed() -> None:
    """A rule that removes old objects took the manifests behind the newest ones."""
    store = MemoryStore()
    grow(store, 200, anchor=40 << 20, delta=1 << 20)
    for version in range(190):
        store.delete(manifest_key(version))
    chain = Chain.open(store)
    head = present(chain.head())
    assert chain.find_state(StateDigest(1, 1)) is None
    assert [edge.version for edge in chain.plan(None, head).edges] == list(range(192, 200))
    with pytest.raises(BrokenChainError):
        chain.plan(None, head, avoid=[e for e in head.manifest.recent if e.kind == "anchor"])


def test_a_head_is_found_where_hint_and_beginning_are_gone() -> None:
    store = MemoryStore()
    made = extend(create(store), 30)
    for version in range(25):
        store.delete(manifest_key(version))
    assert Chain.open(store).head() == made[-1]


def test_one_missing_window_is_read_around() -> None:
    store = MemoryStore()
    made = extend(create(store), 100)
    for version in (99 - 16, 99 - 32 + 1):
        store.delete(manifest_key(version))
    plan = Chain.open(store).plan(40, made[-1])
    assert [edge.version for edge in plan.edges] == list(range(41, 100))


# The hint


@pytest.mark.parametrize(
    "hint",
    [
        dump(Head(version=(1 << 63) - 1)),
        dump(Head(version=LONG * 1000)),
        dump(Head(version=3)),
        b'{"format":1,"version":' + b"9" * 100 + b"}",
        b" " * (1 << 20),
        b"",
    ],
    ids=["largest", "future", "early", "number", "large", "empty"],
)
def test_a_hint_that_lies_stays_cheap(hint: bytes) -> None:
    store = MemoryStore()
    grow(store, 300, anchor=1, delta=1)
    store.put(HEAD_KEY, hint)
    counting = Counting(store)
    head = present(Chain.open(counting).head())
    assert head.version == 299
    assert counting.looks <= 50


def test_a_large_hint_is_not_read() -> None:
    """Its keys would be held in memory while it is parsed."""
    store = MemoryStore()
    made = extend(create(store), 3)
    summary = made[0].manifest.summary()
    many = tuple(msgspec.structs.replace(summary, nbytes=n) for n in range(100_000))
    store.put(HEAD_KEY, dump(Head(version=2, anchors=many)))
    assert Chain.open(store).plan(None, made[2]).edges[0] == summary
    limits: list[int] = []

    class Limited(FaultyStore):
        def get(self, key: str, **asked: Any) -> bytes:
            if key == HEAD_KEY:
                limits.append(asked["limit"])
            return super().get(key, **asked)

    assert Chain.open(Limited(store)).head() == made[2]
    assert limits == [1 << 16]
