"""Manifests on a store that looks up many at once, and cannot decide races."""

from __future__ import annotations

import pytest

from deltachain.chain.chain import Chain
from deltachain.errors import (
    BrokenChainError,
    ChainMismatchError,
    ForkedChainError,
    PublisherFencedError,
)
from deltachain.format.documents import seal
from deltachain.format.keys import CHAIN_KEY, manifest_key
from deltachain.store import MemoryStore
from deltachain.types import Buffer
from tests.support.faults import FaultyStore
from tests.unit.manifest_chains import SingleWriterStore, WideStore, create, extend, manifest_after


@pytest.fixture
def wide() -> WideStore:
    return WideStore()


def test_a_single_writer_store_is_read_back_after_every_commit() -> None:
    inner = SingleWriterStore()
    chain = create(inner)

    def other_writes_too() -> None:
        inner.put(manifest_key(0), seal(manifest_after(None, commit_id="theirs")))

    class Racing(FaultyStore):
        def put(self, key: str, data: Buffer) -> str:
            pin = super().put(key, data)
            other_writes_too()  # between our put and our look
            return pin

    racing = Chain(Racing(inner), chain.identity, chain.table)
    with pytest.raises(PublisherFencedError, match="commit theirs"):
        racing.commit(manifest_after(None))


@pytest.mark.parametrize("length", [1, 2, 16, 17, 18, 19, 50, 400])
@pytest.mark.parametrize("known", [0, 1, 15, 49])
def test_the_newest_is_found_in_few_wide_looks(wide: WideStore, length: int, known: int) -> None:
    chain = create(wide)
    extend(chain, length)
    wide.looks.clear()
    known = min(known, length - 1)
    assert chain.newest(known) == length - 1
    assert len(wide.looks) == 1 if length - 1 - known <= 16 else len(wide.looks) <= 3
    assert all(len(look) <= 1000 for look in wide.looks)


def test_a_gap_ahead_is_named(wide: WideStore) -> None:
    chain = create(wide)
    extend(chain, 5)
    wide.delete(manifest_key(2))
    for known in (1, 2):
        with pytest.raises(BrokenChainError, match="2 is missing, although version 4 exists"):
            chain.newest(known)


def test_a_history_is_looked_at_once_for_many_versions(wide: WideStore) -> None:
    made = extend(create(wide), 300)
    chain = Chain.open(wide)
    wide.looks.clear()
    assert list(chain.history(0, 299)) == made
    assert [len(look) for look in wide.looks] == [301]


def test_the_manifests_of_a_plan_are_looked_at_together(wide: WideStore) -> None:
    made = extend(create(wide), 40)
    chain = Chain.open(wide)
    plan = chain.plan(3, made[-1])
    assert len(plan.edges) == 36
    wide.looks.clear()
    chain.look_ahead(plan)
    assert [chain.read(edge.version) for edge in plan.edges] == made[4:]
    assert len(wide.looks) == 1


def test_a_manifest_that_was_seen_is_read_without_another_look(wide: WideStore) -> None:
    made = extend(create(wide), 3)
    chain = Chain.open(wide)
    assert chain.newest(0) == 2
    wide.looks.clear()
    assert chain.read(2) == made[2]
    assert (wide.looks, wide.pinned[-1]) == ([], made[2].digest)


@pytest.mark.parametrize("store", [SingleWriterStore(), WideStore()], ids=["narrow", "wide"])
def test_a_replaced_manifest_is_a_fork(store: MemoryStore) -> None:
    """Reported by the next look of whoever saw the first, and never committed upon."""
    publisher, follower = create(store), Chain.open(store)
    made = extend(publisher, 3)
    assert follower.newest(0) == 2
    theirs = manifest_after(made[1], commit_id="theirs, which is another")
    store.put(manifest_key(2), seal(theirs))
    with pytest.raises(ForkedChainError, match="version 2 was replaced by another publisher"):
        follower.newest(2)
    with pytest.raises(PublisherFencedError, match="version 3 cannot follow: the manifest"):
        publisher.commit(manifest_after(made[2]))
    assert store.find(manifest_key(3)) is None
    with pytest.raises(PublisherFencedError, match="committed by another publisher"):
        Chain.open(store).commit(made[2].manifest)


def test_a_replaced_identity_fences_whoever_made_the_first(wide: WideStore) -> None:
    chain = create(wide)
    wide.put(CHAIN_KEY, wide.get(CHAIN_KEY).replace(b"one", b"two"))
    with pytest.raises(PublisherFencedError, match="version 0 cannot follow: the chain at this"):
        extend(chain, 1)
    assert wide.find(manifest_key(0)) is None


def test_a_follower_of_a_replaced_chain_says_so(wide: WideStore) -> None:
    """Also once the manifests of the first are all that is left of it."""
    extend(create(wide), 2)
    follower = Chain.open(wide)
    assert follower.newest(0) == 1
    wide.put(CHAIN_KEY, wide.get(CHAIN_KEY).replace(b"one", b"two"))
    with pytest.raises(ForkedChainError, match="the chain at this URL was replaced"):
        follower.newest(1)
    with pytest.raises(ChainMismatchError, match=r"belongs to chain one, but chain\.json to two"):
        Chain.open(wide).read(1)


def test_a_version_that_is_taken_is_not_replaced(wide: WideStore) -> None:
    made = extend(create(wide), 2)
    before = wide.get(manifest_key(1))
    with pytest.raises(PublisherFencedError, match="commit-1, epoch 0; this publisher's was late"):
        Chain.open(wide).commit(manifest_after(made[0], commit_id="late"))
    assert wide.get(manifest_key(1)) == before


def test_a_commit_takes_two_looks(wide: WideStore) -> None:
    chain = create(wide)
    made = extend(chain, 2)
    wide.looks.clear()
    chain.commit(manifest_after(made[-1]))
    assert wide.looks == [
        [CHAIN_KEY, manifest_key(1), manifest_key(2)],
        [CHAIN_KEY, manifest_key(1), manifest_key(2), manifest_key(3)],
    ]


def test_a_publisher_that_slept_before_its_put_is_fenced_by_what_came_since(
    wide: WideStore,
) -> None:
    made = extend(create(wide), 1)

    class Slow(FaultyStore):
        def put(self, key: str, data: Buffer) -> str:
            extend(Chain.open(wide), 2, made[0])
            return super().put(key, data)

    slow = Chain.open(Slow(wide))
    with pytest.raises(PublisherFencedError, match="version 2 already exists"):
        slow.commit(manifest_after(made[0], commit_id="late"))
