import threading
from typing import Any

import msgspec
import pytest

from deltachain import errors
from deltachain.chain.anchor_rule import MOST_VERSIONS, Replay, anchor_due
from deltachain.chain.chain import Chain, Committed
from deltachain.chain.plan import VERSIONS_LISTED, KnownEdges
from deltachain.format import documents, keys
from deltachain.store import MemoryStore
from deltachain.types import StateDigest
from tests.support.faults import Action, Fault, FaultyStore
from tests.unit.manifest_chains import (
    ANCHOR,
    TABLE,
    SingleWriterStore,
    WideStore,
    create,
    extend,
    manifest_after,
    state,
)

DIGEST = "0" * 64

SHARE = 0.5
"""Anchors and manifests over deltas, in bytes, that no chain may exceed."""

BITS_A_CHANGE = {0.01: 10.0, 0.001: 13.6}
"""By density; the encoding `step`, measured."""

OVERHEAD = 1200
"""Bytes of header and directory of a delta with some tens of tensors."""


def edge_of(kind: keys.PayloadKind, version: int, nbytes: int, parts: int) -> documents.Edge:
    refs = tuple(
        documents.ObjectRef(
            key=keys.payload_key(kind, version, 0, "a" * 32, part),
            nbytes=nbytes // parts,
            blake3=DIGEST,
            directory=DIGEST,
        )
        for part in range(parts)
    )
    base = version - 1 if kind == "delta" else None
    return documents.Edge(kind=kind, base=base, encodings=("step",), parts=refs)


@pytest.mark.parametrize(
    ("params", "versions"), [(2e6, 10_000), (0.6e9, 3000), (8e9, 3000), (70e9, 3000)]
)
@pytest.mark.parametrize("density", [0.01, 0.001])
def test_anchors_and_manifests_cost_at_most_half_of_the_deltas(
    params: float, density: float, versions: int
) -> None:
    """Of versions of one size, with the manifests that the publisher would write."""
    delta = int(params * density * BITS_A_CHANGE[density] / 8) + OVERHEAD
    anchor, parts = int(0.67 * 2 * params), max(1, round(delta / 200e6))
    known, added, replay = KnownEdges(), list[documents.EdgeSummary](), Replay()
    spent, anchors = Replay(), 0
    for version in range(versions + 1):
        edge = edge_of("delta", version, delta, parts)
        if version == 0:
            edge = edge_of("anchor", 0, anchor, 16)
        recent, window_from = known.listed(version, added)
        manifest = documents.Manifest(
            chain="0" * 32,
            version=version,
            epoch=0,
            commit_id="a" * 32,
            parent=DIGEST,
            step=version,
            base_state="0" * 32,
            state="0" * 32,
            time=1.7e9 + version / 7,
            nnz=int(params * density),
            numel=int(params),
            edge=edge,
            recent=recent,
            window_from=window_from,
        )
        known, added = known.after(manifest, added), []
        if version == 0:
            continue
        own = Replay(versions=1, deltas=edge.nbytes, manifests=len(documents.seal(manifest)))
        spent, replay = spent + own, replay + own
        assert replay.versions <= MOST_VERSIONS
        if anchor_due(replay, anchor):
            later = edge_of("anchor", version, anchor, 16)
            key = keys.edge_key(version, "anchor", None)
            added = [documents.summarise(version, later, manifest.state, record=key, digest=DIGEST)]
            anchors, replay = anchors + anchor, Replay()
    assert anchors + spent.manifests <= SHARE * spent.deltas


@pytest.mark.parametrize(
    ("replay", "anchor", "settings", "due"),
    [
        # deltas outweigh it
        (Replay(versions=9, deltas=1999), 1000, {}, False),
        (Replay(versions=9, deltas=2000), 1000, {}, True),
        (Replay(versions=9, deltas=2000, manifests=1), 1000, {}, False),
        (Replay(versions=9, deltas=2000), 1000, {"factor": 4}, False),
        # nothing else leads to the head
        (None, 1000, {}, True),
        (None, 1000, {"every": 100}, True),
        # the version of the last one
        (Replay(), 0, {}, False),
        (Replay(), 0, {"factor": 0.001}, False),
        (Replay(), 0, {"every": 1}, False),
        # a set cadence replaces costs
        (Replay(versions=4, deltas=1 << 40), 1000, {"every": 5}, False),
        (Replay(versions=5), 1000, {"every": 5}, True),
        # a factor of one asks for one of every version
        (Replay(versions=1), 1 << 40, {"factor": 1}, True),
        # many versions without changes
        (Replay(versions=MOST_VERSIONS - 1, manifests=1 << 30), 1000, {}, False),
        (Replay(versions=MOST_VERSIONS, manifests=1 << 30), 1000, {}, True),
    ],
)
def test_when_an_anchor_is_due(
    replay: Replay | None, anchor: int, settings: dict[str, Any], due: bool
) -> None:
    assert anchor_due(replay, anchor, **settings) is due


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def chain(store: MemoryStore) -> Chain:
    return create(store)


def test_opening_what_is_not_there_says_so(store: MemoryStore) -> None:
    with pytest.raises(errors.ObjectNotFoundError) as caught:
        Chain.open(store)
    assert "check the URL" in caught.value.hint


def test_another_table_is_another_model(store: MemoryStore, chain: Chain) -> None:
    assert chain.head() is None
    other = documents.Table(tensors=(("a", "BF16", (4, 5)),))
    with pytest.raises(errors.ChainMismatchError, match="2 tensors, this one has 1; for example"):
        Chain.create(store, other, chain_id="two", time=0.0, assets={})
    aliases = documents.Table(tensors=TABLE.tensors)
    with pytest.raises(errors.ChainMismatchError, match="aliases"):
        Chain.create(store, aliases, chain_id="two", time=0.0, assets={})


def test_a_maker_that_died_before_the_identity_is_succeeded(store: MemoryStore) -> None:
    faulty = FaultyStore(store, Fault("fail", keys.CHAIN_KEY))
    with pytest.raises(errors.StoreUnavailableError):
        create(faulty)
    assert create(store).identity.chain == "one"


def test_of_racing_makers_all_get_the_same_chain(store: MemoryStore) -> None:
    barrier = threading.Barrier(4)
    found: list[str] = []

    def make(name: str) -> None:
        barrier.wait(60)
        chain = Chain.create(store, TABLE, chain_id=name, time=0.0, assets={"a.json": b"1"})
        found.append(chain.identity.chain)

    threads = [threading.Thread(target=make, args=(f"maker-{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4
    assert set(found) == {Chain.open(store).identity.chain}


def test_a_table_that_is_not_the_one_named_is_refused(store: MemoryStore, chain: Chain) -> None:
    assert chain.table == TABLE
    store.put(keys.TABLE_KEY, documents.dump(documents.Table(tensors=TABLE.tensors)))
    with pytest.raises(errors.DigestMismatchError) as caught:
        Chain.open(store)
    assert caught.value.key == keys.TABLE_KEY


def test_a_table_that_means_nothing_is_refused(store: MemoryStore) -> None:
    table = documents.Table(tensors=(("a", "BF17", (4,)),))
    Chain.create(store, table, chain_id="one", time=0.0, assets={})
    with pytest.raises(errors.MalformedError, match=keys.TABLE_KEY):
        Chain.open(store)


@pytest.mark.parametrize(
    ("document", "error"),
    [
        (b"", errors.MalformedError),
        (b'{"format":1}', errors.MalformedError),
        (b'{"format":2,"chain":"one"}', errors.UnsupportedFormatError),
    ],
)
@pytest.mark.usefixtures("chain")
def test_an_identity_that_can_not_be_read_is_refused(
    store: MemoryStore, document: bytes, error: type[Exception]
) -> None:
    store.put(keys.CHAIN_KEY, document)
    with pytest.raises(error, match=keys.CHAIN_KEY):
        Chain.open(store)


def test_assets_are_verified(store: MemoryStore) -> None:
    files = {"config.json": b"{}", "tokenizer.json": b"[]"}
    chain = Chain.create(store, TABLE, chain_id="one", time=0.0, assets=files)
    assert dict(chain.assets()) == files
    store.put(chain.identity.assets[1].key, b"{}")
    with pytest.raises(errors.DigestMismatchError):
        list(chain.assets())
    store.put(chain.identity.assets[1].key, b"[0]")
    with pytest.raises(errors.MalformedError):
        list(chain.assets())


@pytest.mark.parametrize("store", [MemoryStore(), WideStore()], ids=["narrow", "wide"])
def test_a_version_is_committed_once(chain: Chain, store: MemoryStore) -> None:
    (first,) = extend(chain, 1)
    data = store.get(keys.manifest_key(0))
    with pytest.raises(
        errors.PublisherFencedError, match="commit-0, epoch 0; this publisher's was mine"
    ):
        Chain.open(store).commit(manifest_after(None, commit_id="mine"))
    assert (chain.read(0), store.get(keys.manifest_key(0))) == (first, data)


@pytest.mark.parametrize("action", ["lose-reply", "fail", "full"])
@pytest.mark.parametrize("single_writer", [False, True])
def test_an_outcome_that_was_lost_is_read_back(action: Action, single_writer: bool) -> None:
    inner = SingleWriterStore() if single_writer else MemoryStore()
    chain = create(FaultyStore(inner, Fault(action, "manifests/")))
    if action == "lose-reply":
        assert chain.commit(manifest_after(None)).version == 0
    else:
        with pytest.raises(errors.StoreUnavailableError):
            chain.commit(manifest_after(None))
        assert chain.head() is None
        chain.commit(manifest_after(None))
    assert chain.read(0).manifest.commit_id == "commit-0"


@pytest.mark.parametrize(
    ("fields", "error", "why"),
    [
        ({"version": 1, "edge": ANCHOR}, errors.MalformedError, "is version 1 of chain"),
        ({"chain": "two"}, errors.ChainMismatchError, r"to chain two, but chain\.json to one: two"),
        ({"state": "zz"}, errors.MalformedError, "not a state digest"),
    ],
    ids=["of another place", "of another chain", "of no state"],
)
def test_a_manifest_that_is_not_the_one_there_is_refused(
    store: MemoryStore, chain: Chain, fields: dict[str, Any], error: type[Exception], why: str
) -> None:
    store.put(keys.manifest_key(0), documents.seal(manifest_after(None, **fields)))
    with pytest.raises(error, match=why) as told:
        chain.read(0)
    assert error is errors.MalformedError or "corrupt" not in str(told.value)


def test_a_reader_of_a_replaced_chain_is_sent_to_the_one_that_is_there(
    store: MemoryStore, chain: Chain
) -> None:
    """Whoever put the old ``chain.json`` back would mix two chains."""
    there = store.get(keys.CHAIN_KEY)
    store.put(keys.CHAIN_KEY, there.replace(b'"one"', b'"two"'))
    store.put(keys.manifest_key(0), documents.seal(manifest_after(None, chain="two")))
    with pytest.raises(errors.ChainMismatchError, match="names two, but one was opened") as told:
        chain.read(0)
    assert "join the one that is there from nothing" in told.value.hint
    assert "restore" not in told.value.hint
    store.put(keys.CHAIN_KEY, there[:-9])
    with pytest.raises(errors.ChainMismatchError, match="belongs to chain two"):
        chain.read(0)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 40])
@pytest.mark.parametrize("hint", [None, 0, 1, 6, 39, 1000])
def test_the_head_is_found_whatever_the_hint_says(
    store: MemoryStore, chain: Chain, length: int, hint: int | None
) -> None:
    extend(chain, length)
    if hint is not None:
        store.put(keys.HEAD_KEY, documents.dump(documents.Head(version=hint)))
    head = chain.head()
    assert head is not None
    assert head.version == length - 1


def test_the_head_is_found_in_a_handful_of_probes(store: MemoryStore, chain: Chain) -> None:
    extend(chain, 300)
    probes: list[str] = []

    class Counting(FaultyStore):
        def find(self, key: str) -> Any:
            probes.append(key)
            return super().find(key)

    counted = Chain(Counting(store), chain.identity, chain.table)
    assert counted.newest(0) == 299
    assert len(probes) < 20
    probes.clear()
    assert counted.newest(299) == 299
    assert len(probes) == 1


def test_history_is_proven_parent_by_parent(store: MemoryStore, chain: Chain) -> None:
    made = extend(chain, 5)
    assert list(chain.history(0, 4)) == made
    assert list(chain.history(3, 2)) == []
    forged = msgspec.structs.replace(made[2].manifest, commit_id="forged")
    store.put(keys.manifest_key(2), documents.seal(forged))
    with pytest.raises(errors.BrokenChainError, match="version 3 names") as caught:
        list(chain.history(0, 4))
    assert caught.value.version == 3
    store.delete(keys.manifest_key(2))
    with pytest.raises(errors.BrokenChainError, match="manifest of version 2 is missing"):
        list(chain.history(0, 4))


def test_a_state_is_found_however_long_ago_it_was(chain: Chain) -> None:
    made = extend(chain, 3 * VERSIONS_LISTED + 5)
    for version in (0, 1, VERSIONS_LISTED, 2 * VERSIONS_LISTED + 1, len(made) - 1):
        assert chain.find_state(made[version].state) == made[version]
    assert chain.find_state(StateDigest(1, 1)) is None


def test_of_equal_states_the_newest_is_found(chain: Chain) -> None:
    (first,) = extend(chain, 1)
    again = chain.commit(manifest_after(first, state=first.manifest.state, epoch=1))
    extend(chain, 2, again)
    assert chain.find_state(first.state) == again


def anchor_of(committed: Committed, digest: str = DIGEST) -> documents.Edge:
    key = f"anchors/{committed.version:020d}-00000000-{'a' * 32}/00000.safetensors"
    return documents.Edge(
        kind="anchor",
        encodings=("dense",),
        parts=(documents.ObjectRef(key=key, nbytes=9, blake3=digest),),
    )


def test_the_first_record_of_a_way_stays(chain: Chain) -> None:
    (first,) = extend(chain, 1)
    one = chain.add_edge(first, anchor_of(first), "")
    two = chain.add_edge(first, anchor_of(first, "1" * 64), "")
    assert one == two
    assert chain.edge(one) == anchor_of(first)


def test_a_record_that_leads_elsewhere_is_refused(store: MemoryStore, chain: Chain) -> None:
    (first,) = extend(chain, 1)
    record = documents.EdgeRecord(
        chain="one",
        version=0,
        manifest=first.digest,
        base_state="",
        state=state(9),
        edge=anchor_of(first),
    )
    key, data = keys.edge_key(0, "anchor", None), documents.seal(record)
    store.put(key, data)
    with pytest.raises(errors.MalformedError, match="leads to another state"):
        chain.add_edge(first, anchor_of(first), "")
    summary = msgspec.structs.replace(
        first.manifest.summary(), record=key, digest=keys.object_digest(data)
    )
    with pytest.raises(errors.MalformedError, match="leads to another state"):
        chain.edge(summary)


@pytest.mark.parametrize(
    "wrong", [{"digest": "1" * 64}, {"record": "edges/other.json"}], ids=["digest", "key"]
)
def test_a_record_that_is_not_the_one_listed_is_refused(
    chain: Chain, wrong: dict[str, str]
) -> None:
    (first,) = extend(chain, 1)
    summary = chain.add_edge(first, anchor_of(first), "")
    with pytest.raises((errors.DigestMismatchError, errors.MalformedError)):
        chain.edge(msgspec.structs.replace(summary, **wrong))


@pytest.mark.parametrize("held", [None, 0, 3, 100])
@pytest.mark.parametrize("target", [150, 199])
def test_a_plan_is_found_over_several_windows(chain: Chain, held: int | None, target: int) -> None:
    made = extend(chain, 200)
    plan = chain.plan(held, made[target])
    first = 0 if held is None else held + 1
    assert [edge.version for edge in plan.edges] == list(range(first, target + 1))


def test_a_plan_reads_few_manifests(store: MemoryStore, chain: Chain) -> None:
    made = extend(chain, 200)
    faulty = FaultyStore(store)
    Chain(faulty, chain.identity, chain.table).plan(190, made[199])
    read = [key for key in faulty.keys_read if key.startswith("manifests/")]
    assert len(read) <= 1


def test_a_way_that_is_avoided_is_looked_for_further_back(chain: Chain) -> None:
    made = extend(chain, 100)
    again = chain.commit(manifest_after(made[-1], edge=ANCHOR))
    assert len(chain.plan(None, again).edges) == 1
    with pytest.raises(
        errors.BrokenChainError, match="no known edges lead from nothing to version 100"
    ):
        chain.plan(None, again, avoid=[again.manifest.summary()])


def test_a_hint_names_the_anchor_of_the_head(store: MemoryStore, chain: Chain) -> None:
    made = extend(chain, 40)
    summary = chain.add_edge(made[-1], anchor_of(made[-1]), "")
    assert len(chain.plan(None, made[-1]).edges) == 40
    chain.write_head(39, [summary])
    assert chain.plan(None, made[-1]).edges == (summary,)
    assert [edge.version for edge in chain.plan(None, made[2]).edges] == [0, 1, 2]  # its future
    store.put(keys.HEAD_KEY, b"garbage")
    assert len(chain.plan(None, made[-1]).edges) == 40
