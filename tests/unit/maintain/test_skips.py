import itertools
import random
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltachain.chain import tags
from deltachain.chain.ancestry import SPANS, hops
from deltachain.chain.chain import Chain, Committed
from deltachain.chain.plan import KnownEdges, Plan
from deltachain.cli.prune import seconds
from deltachain.errors import ConfigError, DigestMismatchError
from deltachain.format import documents
from deltachain.format.keys import HEAD_KEY, edge_key, manifest_key, object_digest
from deltachain.maintain import KeepRule, Maintained, Maintainer, Pruner
from deltachain.maintain.added_edges import add_anchor
from deltachain.maintain.maintainer import anchor_version
from deltachain.maintain.survey import Survey
from deltachain.publish.writer import Writer
from deltachain.store import FileStore, MemoryStore
from deltachain.types import StateDigest, Version
from deltachain.verify import verify
from tests.support.faults import FaultyStore
from tests.support.fetch import fetch
from tests.support.values import present
from tests.unit.cli.support import invoke
from tests.unit.maintain.grown import SPECS, Clock, Grown
from tests.unit.maintain.test_prune import check_bits
from tests.unit.manifest_chains import WideStore, create, manifest_after, state


@pytest.mark.full
@pytest.mark.parametrize("tagged", [64, 67])
def test_a_tagged_version_is_reached_by_an_anchor_that_nothing_lists_any_more(
    tagged: Version,
) -> None:
    """The head hint named it as the tag was set; manifests list it from version 72 on."""
    grown = Grown(Clock())
    grown.grow(1)
    survey = Survey(Chain.open(grown.store))
    maintainer = Maintainer(survey.chain, Pruner(survey, KeepRule(last=17), grace_s=5))
    maintainer.anchor_every = 64

    def grow_to(version: Version) -> None:
        while grown.head < version:
            grown.grow(10)
            Clock.now += 6
            maintainer.round()

    grow_to(80)
    tags.set_(grown.chain, "eval", grown.chain.read(tagged), time=0.0)
    grow_to(300)
    check_bits(grown, tagged)


VERSIONS: Final = 10_000
ANCHOR_NBYTES: Final = 800_000_000
SIZES: Final = {1: 0.0105, 8: 0.0409, 64: 0.1146, 512: 0.2612}
MODEL_NBYTES: Final = round(ANCHOR_NBYTES / 0.67)
AGES: Final = 100


def edge_of(kind: str, version: int, base: int | None) -> documents.Edge:
    span = 0 if base is None else version - base
    nbytes = round(ANCHOR_NBYTES * SIZES.get(span, 1.0))
    key = f"{kind}s/{version:020d}-00000000-{'a' * 32}/00000.safetensors"
    part = documents.ObjectRef(key=key, nbytes=nbytes, blake3="0" * 64)
    return documents.Edge(kind=kind, base=base, encodings=("step",), parts=(part,))  # type: ignore[arg-type]


def record(
    store: MemoryStore, edge: documents.Edge, version: int, digest: str
) -> documents.EdgeSummary:
    base_state = "" if edge.base is None else state(edge.base)
    made = documents.EdgeRecord(
        chain="one",
        version=version,
        manifest=digest,
        base_state=base_state,
        state=state(version),
        edge=edge,
    )
    key, data = edge_key(version, edge.kind, edge.base), documents.seal(made)
    store.put(key, data)
    return documents.summarise(version, edge, made.state, record=key, digest=object_digest(data))


def grow(store: MemoryStore, versions: int = VERSIONS) -> None:
    """A chain that a maintainer kept up with all the time."""
    create(store)
    parent: Committed | None = None
    known, added = KnownEdges(), list[documents.EdgeSummary]()
    edges = list[documents.EdgeSummary]()
    for version in range(versions):
        recent, first = known.listed(version, added)
        own = edge_of("delta", version, version - 1) if parent else edge_of("anchor", 0, None)
        manifest = manifest_after(parent, edge=own, recent=recent, window_from=first)
        data = documents.seal(manifest)
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
    store.put(HEAD_KEY, documents.dump(documents.Head(version=versions - 1)))


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


@pytest.mark.full
def test_a_newcomer_takes_few_objects_and_little_more_than_an_anchor(chain: Chain) -> None:
    chosen = random.Random(1)
    plans = [chain.plan(None, chain.read(chosen.randrange(VERSIONS))) for _ in range(AGES)]
    for plan in plans:
        check(plan)
        assert len(plan.edges) <= 24
    assert median(len(plan.edges) for plan in plans) <= 12
    assert median(plan.nbytes for plan in plans) <= 1.3 * ANCHOR_NBYTES


@pytest.mark.full
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
    head = present(chain.head())
    writer = Writer(chain, numel=19, metadata={}, parent=head)
    counting = Counting(store)
    chain.store = counting
    chain.commits._store = counting
    nbytes = 0
    for version in range(head.version + 1, head.version + 1 + count):
        edge = edge_of("delta", version, version - 1)
        writer.commit(edge, state=StateDigest.parse(state(version)), step=None, nnz=1)
        nbytes += len(store.get(manifest_key(version)))
    return counting.calls, nbytes


@pytest.mark.full
def test_a_version_costs_a_publisher_the_same_however_long_the_chain_is() -> None:
    short, long = MemoryStore(), MemoryStore()
    grow(short, 1000)
    grow(long, 1000 + 14 * 512)
    of_short, of_long = cost_of_versions(short, 64), cost_of_versions(long, 64)
    assert of_long[0] == of_short[0] >= 2 * 64
    assert of_long[1] <= 1.1 * of_short[1]  # numbers of versions have a digit more


def test_objects_are_summed_up_by_kind_and_readers_are_planned_for(tmp_path: Path) -> None:
    grown = Grown(FileStore(tmp_path))
    grown.grow(12)
    infos = list(grown.store.list(""))
    report = invoke("stats", tmp_path, "--json").document
    found = {kind["kind"]: kind for kind in report["kinds"]}
    sizes = [kind["nbytes"] for kind in report["kinds"]]
    assert sizes == sorted(sizes, reverse=True)
    assert report["nbytes"] == sum(sizes) == sum(info.nbytes for info in infos)
    assert (found["manifests"]["objects"], found["deltas"]["objects"]) == (12, 11)
    assert [reader["age"] for reader in report["readers"]] == [None, 1, 10]
    assert all(reader["edges"] for reader in report["readers"])
    for info in infos:
        if info.key.startswith("anchors/"):
            grown.store.delete(info.key)
    report = invoke("stats", tmp_path, "--json").document
    assert report["readers"][0]["edges"] is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("90s", 90), ("1.5h", 5400), ("7d", 604800), ("2 w", 1209600)],
)
def test_spans_of_time(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "-1s", "7x", "soon", "1e3"])
def test_what_is_no_span_of_time_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a span of time") as caught:
        seconds(text)
    assert "30m" in caught.value.hint


@pytest.mark.parametrize("option", ["--keep-last", "--keep-every"])
def test_a_rule_of_nothing_is_refused(option: str) -> None:
    assert invoke("prune", "memory:", option, 0).code == 2


@given(st.integers(0, 20_000), st.integers(0, 20_000))
def test_hops_lead_from_one_version_to_the_other_in_few_steps(one: int, other: int) -> None:
    first, last = sorted((one, other))
    way = hops(first, last)
    ends = [first, *(hop.version for hop in way)]
    assert ends[-1] == last
    assert [hop.base for hop in way] == ends[:-1]
    assert all(hop.span == 1 or (hop.span in SPANS and not hop.base % hop.span) for hop in way)
    assert len(way) <= 42 + (last - first) // 512


@given(st.integers(0, 3000), st.sampled_from(SPANS))
def test_finer_hops_replace_a_skip(number: int, span: int) -> None:
    (hop,) = hops(number * span, number * span + span)[:1]
    finer = hop.finer()
    assert [part.base for part in finer] == [hop.base, *(part.version for part in finer[:-1])]
    assert finer[-1].version == hop.version
    assert len(finer) == 8


def maintained(versions: int, density: float = 0.02, **how: Any) -> tuple[Grown, Maintained]:
    """A chain after a round of maintenance, and what the round did."""
    grown = Grown(MemoryStore(), **how)
    grown.grow(versions, density)
    return grown, present(Maintainer(grown.chain, None).round())


def bits_at(grown: Grown, plan: Plan) -> dict[str, np.ndarray]:
    """What a plan makes of the bits that it starts from."""
    fetched = fetch(grown.chain, plan)
    held = {} if plan.held is None else {n: b.copy() for n, b in grown.bits[plan.held].items()}
    for name in fetched.names:
        delta = fetched.read(name, old=partial(held.__getitem__, name))
        if delta.is_dense:
            held[name] = delta.values
        else:
            held[name][delta.indices] = delta.new_bits(held[name][delta.indices])
    return held


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(one[spec.name], other[spec.name]) for spec in SPECS)


@pytest.mark.full
@pytest.mark.parametrize(
    "encodings",
    [
        ("step",),
        ("overwrite",),
        ("step", "overwrite"),
        ("step", "dense", "overwrite"),
        ("max",),
        ("max", "step", "overwrite", "dense"),
    ],
)
def test_every_skip_leads_to_the_bits_of_its_version(encodings: tuple[str, ...]) -> None:
    grown, done = maintained(76, encodings=encodings, seed=len(encodings))
    assert not done.failed
    spans = [edge.version - (edge.base or 0) for edge in done.skips]
    assert spans.count(8) == 75 // 8
    for edge in done.skips:
        assert list(edge.encodings) == sorted({"dense", "overwrite", "step"} & {*edge.encodings})
        plan = Plan(held=edge.base, target=edge.version, edges=(edge,))
        assert same(bits_at(grown, plan), grown.bits[edge.version]), edge
    assert all(proof.rebuilt for proof in verify(grown.chain))


def test_a_round_without_news_adds_nothing() -> None:
    grown, first = maintained(70)
    assert first.skips
    for chain in (grown.chain, Chain.open(grown.store)):
        assert not present(Maintainer(chain, None).round()).skips


@pytest.mark.full
def test_a_plan_from_far_behind_takes_skips() -> None:
    grown = Grown(MemoryStore())
    grown.grow(300, density=0.004)
    chain = Chain.open(grown.store)
    head = chain.read(grown.head)
    before = chain.plan(3, head)
    Maintainer(grown.chain, None).round()
    chain = Chain.open(grown.store)
    plan = chain.plan(3, head)
    assert len(plan.edges) <= 30 < len(before.edges)
    assert {edge.kind for edge in plan.edges} >= {"skip", "delta"}
    assert same(bits_at(grown, plan), grown.bits[-1])
    assert same(bits_at(grown, chain.plan(None, head)), grown.bits[-1])


def test_a_missing_or_damaged_skip_is_planned_around() -> None:
    grown, _ = maintained(200, 0.004)
    head = grown.chain.read(grown.head)
    taken = [edge for edge in grown.chain.plan(3, head).edges if edge.kind == "skip"]
    store = grown.store
    for number, edge in enumerate(taken[:3]):
        if number == 1:
            store.put(edge.record, b"{}")
        else:
            store.delete(edge.record)
    plan = Chain.open(store).plan(3, head)
    assert not set(plan.edges) & set(taken[:3])
    assert same(bits_at(grown, plan), grown.bits[-1])


def edges_of(grown: Grown) -> tuple[documents.EdgeSummary, ...]:
    return Survey(grown.chain).edges(grown.chain.read(grown.head))


def test_a_survey_names_every_edge_once() -> None:
    grown, _ = maintained(100, 0.002)
    edges = edges_of(grown)
    assert len(set(edges)) == len(edges)
    deltas = [edge.version for edge in edges if edge.kind == "delta"]
    assert deltas == list(range(1, 100))
    assert sum(edge.kind == "skip" for edge in edges) == 12 + 1


def test_two_maintainers_agree_on_every_skip() -> None:
    """Their records race; the loser's parts are named by nobody, and go."""
    grown = Grown(MemoryStore())
    grown.grow(64)
    one, other = (Maintainer(chain, None) for chain in (grown.chain, Chain.open(grown.store)))
    known = edges_of(grown)
    other.survey.edges(grown.chain.read(grown.head))
    one.round()
    assert len(edges_of(grown)) > len(known)
    done = present(other.round())  # it has not seen the records of the first
    for edge in itertools.chain(done.skips, edges_of(grown)):
        grown.chain.edge(edge)
    pruner = Pruner(Survey(grown.chain), KeepRule(last=1000), grace_s=0, tagged=lambda _: ())
    plan = present(pruner.run())
    assert not plan.due
    assert all(proof.rebuilt for proof in verify(grown.chain))


@pytest.mark.parametrize("encodings", [("step",), ("step", "overwrite")])
def test_a_skip_that_leads_to_another_state_is_not_recorded(
    encodings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digests of all parts are right, and yet the manifest says another state."""
    grown = Grown(MemoryStore(), encodings=encodings)
    grown.grow(8)
    monkeypatch.setattr(grown, "state", lambda _: StateDigest())
    grown.commit()
    done = present(Maintainer(grown.chain, None).round())
    assert not done.skips
    assert "skip from 0 to 8: the edges from version 0 to version 8" in done.failed[0]
    assert not list(grown.store.list("edges/"))


def test_an_anchor_of_another_state_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = Grown(MemoryStore())
    grown.grow(8)
    monkeypatch.setattr(grown, "state", lambda _: StateDigest())
    wrong = grown.commit()
    with pytest.raises(DigestMismatchError, match="the plan from nothing to version 8"):
        add_anchor(grown.chain, wrong)
    assert not list(grown.store.list("edges/"))
