from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltachain.chain.ancestry import PLAN_WINDOWS
from deltachain.chain.chain import Chain, Committed
from deltachain.chain.plan import REQUEST_NBYTES, KnownEdges, Plan, cost_of, make_plan
from deltachain.chain.tags import VersionChoice, choose
from deltachain.cli.options import seconds
from deltachain.errors import BrokenChainError, ChainError, ConfigError
from deltachain.format.documents import (
    Edge,
    EdgeKind,
    EdgeSummary,
    Head,
    ObjectRef,
    dump,
    seal,
    summarise,
)
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
            recent=KnownEdges().after(parent.manifest, added).edges if parent else (),
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
    """Counts looks at documents, beside those that are read."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.looks = 0

    @property
    def manifests(self) -> int:
        """Number of manifests that were read."""
        return sum(key.startswith("manifests/") for key in self.keys_read)

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
    assert len(counting.keys_read) + counting.looks <= MOST


@pytest.mark.parametrize("held", [0, LONG - 19_000, LONG - 300])
def test_a_follower_far_behind_reads_few_documents(counting: Counting, held: int) -> None:
    chain = Chain.open(counting)
    assert chain.newest(held) == LONG - 1
    head = chain.read(LONG - 1)
    plan = chain.plan(held, head)
    assert plan.edges[0].base is None
    read_edges(chain, plan.edges)
    assert len(counting.keys_read) <= MOST
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


Row = tuple[int, int | None, float]
"""Epoch, step and time of a version."""


def made(rows: Iterable[Row], store: MemoryStore | None = None) -> tuple[Chain, Counting]:
    """A chain of versions with these epochs, steps and times."""
    counting = Counting(store or MemoryStore())
    chain, parent = create(counting), None
    for epoch, step, time in rows:
        more: dict[str, Any] = {} if parent else {"recent": (), "window_from": 0}
        parent = chain.commit(manifest_after(parent, epoch=epoch, step=step, time=time, **more))
    counting.keys_read.clear()
    return Chain.open(counting), counting


def one_run(versions: int) -> list[Row]:
    return [(0, 10 * version, 100.0 + version) for version in range(versions)]


def test_the_head_is_meant_where_nothing_is_said() -> None:
    chain, _ = made(one_run(5))
    assert choose(chain, VersionChoice()).version == 4
    assert choose(chain, VersionChoice(version=2)).version == 2


def test_two_names_of_a_version_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="version and step exclude each other"):
        VersionChoice(version=1, step=1)
    with pytest.raises(ConfigError, match="at and tag exclude each other"):
        VersionChoice(at=1.0, tag="best")
    assert VersionChoice(step=0).is_search
    assert not VersionChoice(version=0).is_search


@pytest.mark.parametrize("store", [MemoryStore, WideStore])
def test_steps_of_one_run_are_bisected(store: type[MemoryStore]) -> None:
    chain, _ = made(one_run(300), store())
    for version in (0, 1, 2, 150, 298, 299):
        assert choose(chain, VersionChoice(step=10 * version)).version == version


@pytest.mark.parametrize(
    "choice",
    [
        VersionChoice(step=4000),
        VersionChoice(step=4005),
        VersionChoice(at=500.5),
        VersionChoice(at=0.0),
    ],
)
def test_a_search_reads_few_manifests(choice: VersionChoice) -> None:
    chain, store = made(one_run(1000))
    if choice in (VersionChoice(step=4005), VersionChoice(at=0.0)):
        with pytest.raises(ChainError):
            choose(chain, choice)
    else:
        choose(chain, choice)
    assert store.manifests <= 34


FIRST: list[Row] = [(0, 10 * n, 0.0) for n in range(8)]
REVERTED: list[Row] = [*FIRST, (1, 70, 0.0), (1, 30, 0.0)]


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        (
            [*FIRST, *((1, step, 0.0) for step in (70, None, 30, 40, 50))],
            {70: (7, 8), 60: (6,), 50: (12,), 40: (11,), 30: (10,), 20: (2,), 0: (0,)},
        ),
        (REVERTED, {30: (9,)}),
        ([*REVERTED, (2, 30, 0.0), (2, 31, 0.0)], {30: (10,), 31: (11,), 60: (6,)}),
        ([(n, n // 2, 0.0) for n in range(200)], {3: (7,)}),
    ],
    ids=["a trainer went back", "reverted", "gone on after a revert", "each push is an epoch"],
)
def test_the_newest_of_a_step_that_came_twice_is_meant(
    rows: list[Row], wanted: dict[int, tuple[int, ...]]
) -> None:
    chain, store = made(rows)
    for step, versions in wanted.items():
        store.keys_read.clear()
        assert choose(chain, VersionChoice(step=step)).version in versions
        assert store.manifests <= 202


@pytest.mark.full
@settings(max_examples=60)
@given(st.data())
def test_every_step_is_found_whatever_is_left_out(data: st.DataObject) -> None:
    """Within an epoch, steps grow and some versions have none."""
    rows: list[Row] = []
    for epoch in range(data.draw(st.integers(1, 4))):
        step = data.draw(st.integers(0, 40))
        for _ in range(data.draw(st.integers(1, 12))):
            step += data.draw(st.integers(0, 3))
            given_step = step if data.draw(st.booleans()) else None
            rows.append((epoch, given_step, 0.0))
    chain, _ = made(rows)
    for step in {row[1] for row in rows if row[1] is not None}:
        wanted = max(n for n, row in enumerate(rows) if row[1] == step)
        assert choose(chain, VersionChoice(step=step)).version == wanted


def test_a_step_that_no_version_has_is_refused_with_its_neighbours() -> None:
    chain, _ = made(one_run(40))
    with pytest.raises(ChainError, match=r"no version of step 155") as refused:
        choose(chain, VersionChoice(step=155))
    assert refused.value.hint == "near it are the steps 150 (version 15) and 160 (version 16)"
    chain, _ = made([(0, None, 0.0)] * 30)
    with pytest.raises(ChainError, match="no version has a step"):
        choose(chain, VersionChoice(step=1))


def test_the_newest_version_of_a_time_is_meant() -> None:
    chain, _ = made([(0, None, 1000.0 + 10 * (n // 2)) for n in range(50)])
    for at, version in ((1000.0, 1), (1009.9, 1), (1010.0, 3), (1e12, 49), (1240.0, 49)):
        assert choose(chain, VersionChoice(at=at)).version == version
    with pytest.raises(ChainError, match="at or before 1970-01-01T00:16:39") as refused:
        choose(chain, VersionChoice(at=999.5))
    assert refused.value.hint == "version 0 is the oldest, of 1970-01-01T00:16:40+00:00"


def test_lost_manifests_are_passed() -> None:
    chain, store = made(one_run(60))
    for version in (0, 20, 29, 30, 44):
        store.delete(manifest_key(version))
    chain = Chain.open(store)
    assert choose(chain, VersionChoice(step=280)).version == 28
    assert choose(chain, VersionChoice(at=129.5)).version == 28
    with pytest.raises(ChainError, match="no version of step 300"):
        choose(chain, VersionChoice(step=300))


def test_versions_that_are_not_there_are_refused() -> None:
    chain, _ = made(one_run(3))
    with pytest.raises(ChainError, match="does not have version 7") as refused:
        choose(chain, VersionChoice(version=7))
    assert refused.value.hint == "the head is version 2"
    with pytest.raises(ChainError, match="has no tag 'worst'"):
        choose(chain, VersionChoice(tag="worst"))
    with pytest.raises(ChainError, match="no version yet"):
        choose(create(MemoryStore()), VersionChoice(step=1))


def test_times_are_read_as_iso_8601_or_seconds() -> None:
    assert seconds("1700000000.5") == 1700000000.5
    assert seconds("2023-11-14T22:13:20Z") == seconds("2023-11-14T23:13:20+01:00") == 1700000000.0
    for text in ("yesterday", "", "nan", "inf", "9999999-01-01"):
        with pytest.raises(ConfigError, match="is no time"):
            seconds(text)


KNOWN = frozenset({"step", "dense"})


def edge(
    version: int,
    base: int | None,
    nbytes: int = 100,
    *,
    parts: int = 1,
    encodings: tuple[str, ...] = ("step",),
) -> EdgeSummary:
    kind: EdgeKind = "anchor" if base is None else "delta" if base == version - 1 else "skip"
    return EdgeSummary(
        version=version,
        kind=kind,
        base=base,
        nbytes=nbytes,
        parts=parts,
        encodings=encodings,
        state="",
    )


@st.composite
def graphs(draw: st.DrawFn) -> list[EdgeSummary]:
    def one() -> EdgeSummary:
        version = draw(st.integers(0, 7))
        base = draw(st.one_of(st.none(), st.integers(0, version - 1))) if version else None
        encodings = draw(st.sampled_from([("step",), ("dense", "step"), ("max",), ()]))
        nbytes = draw(st.integers(0, 4)) * REQUEST_NBYTES // 2
        return edge(version, base, nbytes, parts=draw(st.integers(0, 3)), encodings=encodings)

    return [one() for _ in range(draw(st.integers(0, 14)))]


def every_way(held: int | None, target: int, edges: list[EdgeSummary]) -> list[list[EdgeSummary]]:
    """All ways from what is held, or from nothing, to a version."""
    ways: list[list[EdgeSummary]] = [[]] if held == target else []
    for last in edges:
        if last.version == target and KNOWN.issuperset(last.encodings):
            if last.base is None:
                ways.append([last])
            else:
                ways += [[*way, last] for way in every_way(held, last.base, edges)]
    return ways


@settings(max_examples=400)
@given(graphs(), st.one_of(st.none(), st.integers(0, 7)), st.integers(0, 7))
def test_the_plan_is_the_cheapest_of_all_ways(
    edges: list[EdgeSummary], held: int | None, target: int
) -> None:
    ways = every_way(held, target, edges)
    if not ways:
        with pytest.raises(BrokenChainError):
            make_plan(held, target, edges, encodings=KNOWN)
        return
    plan = make_plan(held, target, edges, encodings=KNOWN)
    assert list(plan.edges) in ways
    assert plan.cost == min(sum(cost_of(e) for e in way) for way in ways)
    assert (plan.held, plan.target) == (held, target)


def test_a_plan_prints_what_it_fetches() -> None:
    edges = (edge(4, None, 12_000_000, parts=3), edge(5, 4, 1_000))
    plan = Plan(held=None, target=5, edges=edges)
    assert str(plan) == (
        "nothing to 5: anchor->4 (12,000,000 B), delta->5 (1,000 B); 12,001,000 B, 6 requests"
    )
    assert plan.cost == 12_001_000 + 6 * REQUEST_NBYTES
    held = make_plan(3, 3, [edge(3, None)], encodings=KNOWN)
    assert str(held) == "3 to 3: nothing to do; 0 B, 0 requests"


@pytest.mark.parametrize(("held", "origin"), [(None, "nothing"), (2, "version 2")])
def test_without_a_way_the_error_says_from_where(held: int | None, origin: str) -> None:
    with pytest.raises(BrokenChainError, match=f"from {origin} to version 9") as caught:
        make_plan(held, 9, [edge(9, 8), edge(2, None)], encodings=KNOWN)
    assert caught.value.version == 9
