"""How many objects newcomers and followers far behind fetch of a chain of 10,000 versions.

Sizes are those of a run of 2.1 M elements at 1.08 % (``bench.chains.SyntheticChain``), as shares of
an anchor: a delta 0.0105, skips over 8, 64 and 512 versions 0.0409, 0.1146 and 0.2612.
"""

from __future__ import annotations

import random
from statistics import median
from typing import Any, Final

import pytest

from deltachain.chain.ancestry import SPANS
from deltachain.chain.chain import Chain, Committed
from deltachain.chain.plan import KnownEdges, Plan
from deltachain.format.documents import (
    Edge,
    EdgeRecord,
    EdgeSummary,
    Head,
    ObjectRef,
    dump,
    seal,
    summarise,
)
from deltachain.format.keys import HEAD_KEY, edge_key, manifest_key, object_digest
from deltachain.maintain.maintainer import anchor_version
from deltachain.publish.writer import Writer
from deltachain.store import MemoryStore
from deltachain.types import StateDigest
from tests.support.faults import FaultyStore
from tests.unit.manifest_chains import WideStore, create, manifest_after, state

VERSIONS: Final = 10_000
ANCHOR_NBYTES: Final = 800_000_000
SIZES: Final = {1: 0.0105, 8: 0.0409, 64: 0.1146, 512: 0.2612}
MODEL_NBYTES: Final = round(ANCHOR_NBYTES / 0.67)
AGES: Final = 100


def edge_of(kind: str, version: int, base: int | None) -> Edge:
    span = 0 if base is None else version - base
    nbytes = round(ANCHOR_NBYTES * SIZES.get(span, 1.0))
    key = f"{kind}s/{version:020d}-00000000-{'a' * 32}/00000.safetensors"
    part = ObjectRef(key=key, nbytes=nbytes, blake3="0" * 64)
    return Edge(kind=kind, base=base, encodings=("step",), parts=(part,))  # type: ignore[arg-type]


def record(store: MemoryStore, edge: Edge, version: int, digest: str) -> EdgeSummary:
    base_state = "" if edge.base is None else state(edge.base)
    made = EdgeRecord(
        chain="one",
        version=version,
        manifest=digest,
        base_state=base_state,
        state=state(version),
        edge=edge,
    )
    key, data = edge_key(version, edge.kind, edge.base), seal(made)
    store.put(key, data)
    return summarise(version, edge, made.state, record=key, digest=object_digest(data))


def grow(store: MemoryStore, versions: int = VERSIONS) -> None:
    """A chain that a maintainer kept up with all the time."""
    create(store)
    parent: Committed | None = None
    known, added = KnownEdges(), list[EdgeSummary]()
    edges = list[EdgeSummary]()
    for version in range(versions):
        recent, first = known.listed(version, added)
        own = edge_of("delta", version, version - 1) if parent else edge_of("anchor", 0, None)
        manifest = manifest_after(parent, edge=own, recent=recent, window_from=first)
        data = seal(manifest)
        store.put(manifest_key(version), data)
        parent = Committed(manifest, object_digest(data))
        known, added = known.after(manifest, added), []
        edges.append(manifest.summary())
        for span in SPANS:
            if version and version % span == 0:
                record(store, edge_of("skip", version, version - span), version, parent.digest)
        due = anchor_version(
            edges, head=version, model_nbytes=MODEL_NBYTES, manifest_nbytes=len(data)
        )
        if due == version:
            added = [record(store, edge_of("anchor", version, None), version, parent.digest)]
            edges = [added[0]]
    store.put(HEAD_KEY, dump(Head(version=versions - 1)))


@pytest.fixture(scope="module")
def grown() -> MemoryStore:
    store = MemoryStore()
    grow(store)
    return store


@pytest.fixture(scope="module", params=[MemoryStore, WideStore], ids=["one-a-request", "wide"])
def chain(request: pytest.FixtureRequest, grown: MemoryStore) -> Chain:
    store: MemoryStore = request.param()
    store._objects.update(grown._objects)
    return Chain.open(store)


class Counting(FaultyStore):
    """Counts every call of a store."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.calls = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("get", "read", "put", "put_if_absent", "find", "find_all", "list"):
            object.__setattr__(self, "calls", object.__getattribute__(self, "calls") + 1)
        return object.__getattribute__(self, name)


def check(plan: Plan) -> None:
    bases = [edge.base for edge in plan.edges]
    ends = [plan.held, *(edge.version for edge in plan.edges)]
    assert all(base in (None, end) for base, end in zip(bases, ends, strict=False))
    assert ends[-1] == plan.target


def test_a_newcomer_takes_few_objects_and_little_more_than_an_anchor(chain: Chain) -> None:
    chosen = random.Random(1)
    plans = [chain.plan(None, chain.read(chosen.randrange(VERSIONS))) for _ in range(AGES)]
    for plan in plans:
        check(plan)
        assert len(plan.edges) <= 24
    assert median(len(plan.edges) for plan in plans) <= 12
    assert median(plan.nbytes for plan in plans) <= 1.3 * ANCHOR_NBYTES


def test_a_follower_far_behind_takes_few_objects(chain: Chain) -> None:
    chosen = random.Random(2)
    plans = []
    for _ in range(AGES):
        held = chosen.randrange(VERSIONS - 1000)
        plans.append(chain.plan(held, chain.read(held + 1000)))
    for plan in plans:
        check(plan)
        assert len(plan.edges) <= 44
        assert plan.nbytes <= 2 * ANCHOR_NBYTES
    assert median(len(plan.edges) for plan in plans) <= 24
    ages = [chosen.randrange(1, 4000) for _ in range(AGES)]
    head = chain.read(VERSIONS - 1)
    plans = [chain.plan(head.version - age, head) for age in ages]
    assert max(len(plan.edges) for plan in plans) <= 44
    assert median(len(plan.edges) for plan in plans) <= 24
    assert median(plan.nbytes for plan in plans) <= 1.3 * ANCHOR_NBYTES


def test_documents_read_for_a_plan_do_not_grow_with_the_chain(chain: Chain) -> None:
    store = chain.store
    assert isinstance(store, MemoryStore)
    reads: list[str] = []
    original = store.get

    def get(key: str, **limit: int) -> bytes:
        reads.append(key)
        return original(key, **limit)

    store.get = get  # type: ignore[method-assign]
    most = 0
    for age in (1, 30, 300, 1000, 3000, 9000):
        reads.clear()
        chain.plan(VERSIONS - 1 - age, chain.read(VERSIONS - 1))
        most = max(most, len(reads))
    del store.get
    assert most <= 100


def cost_of_versions(store: MemoryStore, count: int) -> tuple[int, int]:
    """Commit versions; return the requests and the bytes of manifests that they took."""
    chain = Chain.open(store)
    head = chain.head()
    assert head is not None
    writer = Writer(chain, numel=19, metadata={}, parent=head)
    counting = Counting(store)
    chain.store = counting
    chain._commits._store = counting
    nbytes = 0
    for version in range(head.version + 1, head.version + 1 + count):
        draft = writer.draft(state=StateDigest.parse(state(version)), step=None, nnz=1)
        writer.commit(draft, edge_of("delta", version, version - 1))
        nbytes += len(store.get(manifest_key(version)))
    return counting.calls, nbytes


def test_a_version_costs_a_publisher_the_same_however_long_the_chain_is() -> None:
    short, long = MemoryStore(), MemoryStore()
    grow(short, 1000)
    grow(long, 1000 + 14 * 512)
    of_short, of_long = cost_of_versions(short, 64), cost_of_versions(long, 64)
    assert of_long[0] == of_short[0] >= 2 * 64
    assert of_long[1] <= 1.1 * of_short[1]  # numbers of versions have a digit more
