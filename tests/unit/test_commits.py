"""Commits on stores that go back, lose things or lie: never over a gap, never in silence.

The identity of a chain is made once, never where versions are, and put back where it is lost.
"""

from collections.abc import Callable

import pytest

from deltachain.chain import commits
from deltachain.chain.chain import Chain, Committed
from deltachain.errors import (
    BrokenChainError,
    ChainMismatchError,
    MalformedError,
    ObjectNotFoundError,
    PublisherFencedError,
    StoreUnavailableError,
    StoreWentBackError,
)
from deltachain.format.documents import Edge, ObjectRef, Table, seal
from deltachain.format.keys import CHAIN_KEY, HEAD_KEY, TABLE_KEY, manifest_key, payload_key
from deltachain.store import MemoryStore
from deltachain.types import Buffer
from tests.support.backup import objects_of, put_back
from tests.support.faults import Fault, FaultyStore
from tests.unit.manifest_chains import STORES, TABLE, create, extend, manifest_after


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> MemoryStore:
    made: MemoryStore = request.param()
    return made


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "AGAIN_S", 0.0)


def extend_with_part(chain: Chain) -> tuple[Committed, str]:
    """Commit four versions, the last of which has a payload: that version, and its key."""
    (*_, parent) = extend(chain, 3)
    ref = ObjectRef(key=payload_key("delta", 3, 0, "a" * 32, 0), nbytes=3, blake3="0" * 64)
    edge = Edge(kind="delta", base=2, encodings=("step",), parts=(ref,))
    chain.store.put(ref.key, b"abc")
    return chain.commit(manifest_after(parent, edge=edge)), ref.key


@pytest.mark.parametrize("back", [2, 9, 10])
def test_nothing_is_committed_over_a_gap(store: MemoryStore, back: int) -> None:
    chain = create(store)
    made = extend(chain, 10)
    then = objects_of(store)
    for version in range(10 - back, 10):
        store.delete(manifest_key(version))
    before = objects_of(store)
    newest = 9 - back if back < 10 else "none"
    for _ in range(2):
        with pytest.raises(
            StoreWentBackError, match=f"the newest version left is {newest}\n"
        ) as caught:
            chain.commit(manifest_after(made[-1]))
        assert caught.value.version == 9
        assert "restart this publisher" in caught.value.hint
        with pytest.raises(StoreWentBackError):
            chain.settle(manifest_after(made[-1]))
    assert objects_of(store) == before
    put_back(store, then)  # and when it is as it was, publishing goes on
    assert chain.settle(manifest_after(made[-1])) is None
    assert chain.commit(manifest_after(made[-1])).version == 10


def test_a_store_that_is_empty_now_is_not_begun_again(store: MemoryStore) -> None:
    """A folder that is not mounted: what is put there would be in the wrong place."""
    chain = create(store)
    made = extend(chain, 3)
    put_back(store, {})
    with pytest.raises(ObjectNotFoundError, match="is gone"):
        chain.commit(manifest_after(made[-1]))
    assert objects_of(store) == {}


def test_a_commit_over_a_gap_is_never_believed(store: MemoryStore) -> None:
    """The store goes back between the look and the put; later it is put right."""
    made = extend(create(store), 6)
    then = objects_of(store)

    def go_back() -> None:
        for version in range(3, 6):
            store.delete(manifest_key(version))

    chain = Chain.open(FaultyStore(store, Fault(go_back, manifest_key(6))))
    manifest = manifest_after(made[-1])
    with pytest.raises(StoreWentBackError, match=r"manifests/0{19}6\.json .* behind a gap") as one:
        chain.commit(manifest)
    assert "remove manifests/" in one.value.hint
    with pytest.raises(StoreWentBackError):
        chain.settle(manifest)
    put_back(store, then | {manifest_key(6): store.get(manifest_key(6))})
    settled = chain.settle(manifest)
    assert settled is not None
    assert settled == Chain.open(store).read(6)


def test_a_parent_in_whose_place_another_version_was_put_fences_nobody(store: MemoryStore) -> None:
    chain = create(store)
    made = extend(chain, 6)
    key = manifest_key(5)
    data = store.get(key)
    store.put(key, store.get(manifest_key(4)))
    with pytest.raises(MalformedError, match=f"{key}: is version 4") as caught:
        chain.commit(manifest_after(made[-1]))
    assert f"remove {key} and every later manifest" in caught.value.hint
    assert "restart the publisher" in caught.value.hint
    store.put(key, data)
    assert chain.commit(manifest_after(made[-1])).version == 6


def test_a_history_that_another_went_on_with_fences(store: MemoryStore) -> None:
    chain = create(store)
    made = extend(chain, 6)
    for version in range(3, 6):
        store.delete(manifest_key(version))
    parent = made[2]
    for _ in range(4):
        parent = Chain.open(store).commit(manifest_after(parent, epoch=1, commit_id="theirs"))
    with pytest.raises(PublisherFencedError, match=r"version 5 was replaced by another publisher"):
        chain.commit(manifest_after(made[-1]))


def test_a_manifest_of_a_lost_history_is_not_taken_for_another_publisher() -> None:
    """Where races are decided; elsewhere it cannot be told from a second publisher's."""
    store = MemoryStore()
    made = extend(create(store), 6)
    for version in range(3, 5):
        store.delete(manifest_key(version))
    chain, parent = Chain.open(store), made[2]
    for _ in range(2):
        parent = chain.commit(manifest_after(parent, epoch=1))
    with pytest.raises(BrokenChainError, match="left by a history that the store has lost") as one:
        chain.commit(manifest_after(parent, epoch=1, commit_id="new"))
    assert f"remove {manifest_key(5)}" in one.value.hint
    store.delete(manifest_key(5))
    assert chain.commit(manifest_after(parent, epoch=1, commit_id="new")).version == 5


def test_a_put_that_was_lost_is_not_believed() -> None:
    class LyingStore(MemoryStore):
        lies = False

        def put_if_absent(self, key: str, data: Buffer) -> None:
            if not self.lies:
                super().put_if_absent(key, data)

    store = LyingStore()
    chain = create(store)
    made = extend(chain, 3)
    store.lies = True
    with pytest.raises(StoreUnavailableError, match="but does not return it"):
        chain.commit(manifest_after(made[-1]))
    store.lies = False
    assert chain.settle(manifest_after(made[-1])) is None
    assert chain.commit(manifest_after(made[-1])).version == 3


@pytest.mark.parametrize("version", [2, 3])
def test_one_stale_answer_fails_nothing(store: MemoryStore, version: int) -> None:
    made = extend(create(store), 3)
    chain = Chain.open(FaultyStore(store, Fault("hide", manifest_key(version))))
    assert chain.commit(manifest_after(made[-1])).version == 3
    assert chain.commits.take_restored() == ()


def test_the_newest_manifest_is_put_back(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    chain = create(store)
    newest, _ = extend_with_part(chain)
    before = objects_of(store)
    store.delete(manifest_key(3))
    assert chain.commit(manifest_after(newest)).version == 4
    assert objects_of(store).items() >= before.items()
    assert chain.commits.take_restored() == (manifest_key(3),)
    assert chain.commits.take_restored() == ()
    assert "was restored" in caplog.text


@pytest.mark.parametrize("gone", ["part", "grandparent", "identity"])
def test_the_newest_manifest_is_not_put_back_where_more_is_gone(
    store: MemoryStore, gone: str
) -> None:
    chain = create(store)
    newest, key = extend_with_part(chain)
    store.delete(manifest_key(3))
    store.delete({"part": key, "grandparent": manifest_key(2), "identity": CHAIN_KEY}[gone])
    before = objects_of(store)
    with pytest.raises(StoreWentBackError):
        chain.commit(manifest_after(newest))
    assert objects_of(store) == before


def test_an_identity_that_is_lost_is_put_back(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    chain = Chain.open(store) if store.find(CHAIN_KEY) else create(store)
    made = extend(chain, 1)
    identity = {key: store.get(key) for key in (CHAIN_KEY, TABLE_KEY)}
    for key in identity:
        store.delete(key)
    made += extend(chain, commits.IDENTITY_EVERY, made[-1])
    assert {key: store.get(key) for key in identity} == identity
    assert set(chain.commits.take_restored()) == set(identity)
    assert caplog.text.count("objects are deleted that must stay") == 2
    caplog.clear()
    made += extend(chain, 2 * commits.IDENTITY_EVERY, made[-1])
    assert caplog.messages == []
    started_again = Chain.open(store)
    store.delete(CHAIN_KEY)
    started_again.commit(manifest_after(made[-1]))  # its first
    assert Chain.open(store).identity == chain.identity


def test_an_identity_of_another_chain_fences(store: MemoryStore) -> None:
    chain = create(store)
    made = extend(chain, 2)
    store.put(CHAIN_KEY, store.get(CHAIN_KEY).replace(b'"one"', b'"another"'))
    with pytest.raises(PublisherFencedError, match="two chains here"):
        extend(chain, commits.IDENTITY_EVERY, made[-1])


def test_an_identity_that_was_copied_back_is_the_same(store: MemoryStore) -> None:
    """A backup has other times than what it restores."""
    chain = create(store)
    made = extend(chain, 3)
    put_back(store, objects_of(store))
    made += extend(chain, 2 * commits.IDENTITY_EVERY, made[-1])
    assert made[-1].version == 2 + 2 * commits.IDENTITY_EVERY


def test_a_manifest_of_another_chain_says_so(store: MemoryStore) -> None:
    made = extend(create(store), 2)
    store.put(manifest_key(2), seal(manifest_after(made[-1], chain="two")))
    with pytest.raises(ChainMismatchError, match="two chains here"):
        Chain.open(store).commit(manifest_after(made[-1], commit_id="mine"))


def test_looks_cost_three_requests_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each look at a key is a request; and three more in each eighth version."""
    store, asked = MemoryStore(), list[str]()
    find: Callable[[str], object] = store.find

    def counted(key: str) -> object:
        asked.append(key)
        return find(key)

    chain = create(store)
    parent = extend(chain, 8)[-1]
    monkeypatch.setattr(store, "find", counted)
    extend(chain, 8, parent)
    assert len(asked) == 8 * 3 + 2


@pytest.mark.parametrize(
    "traces",
    [[manifest_key(0)], [manifest_key(2)], [HEAD_KEY], [HEAD_KEY, manifest_key(1)]],
    ids=["the first", "the last", "a hint", "a hint and one"],
)
def test_no_identity_is_made_where_versions_are(store: MemoryStore, traces: list[str]) -> None:
    chain = create(store)
    extend(chain, 3)
    chain.write_head(2, [])
    for info in list(store.list()):
        if info.key not in traces:
            store.delete(info.key)
    before = objects_of(store)
    with pytest.raises(BrokenChainError, match=r"identity is lost: .* has versions") as caught:
        create(store)
    assert "from a backup" in caught.value.hint
    assert objects_of(store) == before


def test_a_reader_is_told_that_the_identity_is_lost(store: MemoryStore) -> None:
    extend(create(store), 2)
    store.delete(CHAIN_KEY)
    with pytest.raises(ObjectNotFoundError, match="identity is lost") as caught:
        Chain.open(store)
    assert "from a backup" in caught.value.hint


def test_a_lost_table_is_put_back_by_whoever_has_it(store: MemoryStore) -> None:
    extend(create(store), 2)
    before = objects_of(store)
    store.delete(TABLE_KEY)
    with pytest.raises(ObjectNotFoundError, match=r"table\.json of chain one is lost"):
        Chain.open(store)
    assert create(store).table == TABLE
    assert objects_of(store) == before


def test_another_model_puts_no_table_beside_an_identity(store: MemoryStore) -> None:
    extend(create(store), 1)
    store.delete(TABLE_KEY)
    before = objects_of(store)
    other = Table(tensors=(("a", "BF16", (4, 5)),))
    with pytest.raises(ChainMismatchError, match=r"whose table\.json is lost"):
        Chain.create(store, other, chain_id="two", time=0.0, assets={})
    assert objects_of(store) == before
