from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltachain import errors
from deltachain.chain import tags
from deltachain.chain.chain import Chain, is_reachable, plan_present
from deltachain.chain.manifests import NONE, newest_number
from deltachain.chain.plan import KnownEdges
from deltachain.format import keys
from deltachain.format.documents import Edge, ObjectRef, Tag, seal
from deltachain.store import MemoryStore, ObjectInfo
from deltachain.types import Buffer
from tests.support.faults import Fault, FaultyStore
from tests.support.values import present
from tests.unit.manifest_chains import STORES, SingleWriterStore, WideStore, create, manifest_after


class CountingStore(MemoryStore):
    """One that counts what it is asked."""

    asked = 0

    def find(self, key: str) -> ObjectInfo | None:
        self.asked += 1
        return super().find(key)


def key(number: int) -> str:
    return f"tags/x/{number:08d}.json"


def numbered(store: MemoryStore, count: int) -> MemoryStore:
    for number in range(count):
        store.put(key(number), b"x")
    return store


@given(st.integers(0, 300), st.booleans())
def test_the_newest_is_found(count: int, wide: bool) -> None:
    store = numbered(WideStore() if wide else MemoryStore(), count)
    assert newest_number(store, key) == count - 1
    for known in range(0, count, 7):
        assert newest_number(store, key, known=known) == count - 1


@pytest.mark.parametrize("count", [0, 1, 2, 100, 5000])
def test_lookups_grow_with_the_logarithm(count: int) -> None:
    store = CountingStore()
    numbered(store, count)
    newest_number(store, key)
    assert store.asked <= 2 * count.bit_length() + 1
    wide = WideStore()
    numbered(wide, count)
    newest_number(wide, key)
    assert len(wide.looks) <= 4


def test_a_record_lost_below_the_newest_hides_nothing() -> None:
    store = numbered(WideStore(), 40)
    store.delete(key(5))
    assert newest_number(store, key) == 39


def test_a_store_that_says_yes_to_everything_comes_to_an_end() -> None:
    class Yes(MemoryStore):
        def find(self, key: str) -> ObjectInfo:
            return ObjectInfo(key=key, nbytes=0, modified=None)

    assert newest_number(Yes(), key) < 10**8
    assert NONE == -1


def part(chain: Chain, kind: keys.PayloadKind, version: int) -> ObjectRef:
    """A payload that exists; nobody reads what is in it."""
    key = keys.payload_key(kind, version, 0, "0" * 32, 0)
    chain.store.put(key, b"payload")
    return ObjectRef(key=key, nbytes=7, blake3="0" * 64)


def filled(store: MemoryStore, versions: int = 6) -> Chain:
    """A chain whose version 0 is an anchor, and all others deltas, each of one part."""
    chain, parent = create(store), None
    for version in range(versions):
        edge = Edge(kind="anchor", encodings=("dense",), parts=(part(chain, "anchor", 0),))
        if version:
            parts = (part(chain, "delta", version),)
            edge = Edge(kind="delta", base=version - 1, encodings=("step",), parts=parts)
        parent = chain.commit(manifest_after(parent, edge=edge))
    return chain


@pytest.mark.parametrize("kind", STORES)
def test_a_tag_is_set_moved_and_removed(kind: Callable[[], MemoryStore]) -> None:
    chain = filled(kind())
    assert (tags.read(chain, "best"), tags.read_all(chain)) == (None, ())
    first = tags.set_(chain, "best", chain.read(2), time=1.0)
    assert (first.number, first.version, first.manifest) == (0, 2, chain.read(2).digest)
    moved = tags.set_(chain, "best", chain.read(4), time=2.0)
    tags.set_(chain, "eval-step-4000", chain.read(1), time=3.0)
    assert (moved.number, tags.read(chain, "best")) == (1, moved)
    assert tags.committed(chain, moved).version == 4
    assert tags.set_(chain, "best", chain.read(4), time=3.0) == moved  # nothing is written
    assert [(tag.name, tag.version) for tag in tags.read_all(chain)] == [
        ("best", 4),
        ("eval-step-4000", 1),
    ]
    assert tags.remove(chain, "best", time=4.0) == moved
    assert tags.read(chain, "best") is None
    assert [tag.name for tag in tags.read_all(chain)] == ["eval-step-4000"]
    assert tags.set_(chain, "best", chain.read(0), time=5.0).number == 3
    found = [info.key for info in chain.store.list("tags/best/")]
    assert found == [keys.tag_key("best", number) for number in range(4)]


@pytest.mark.parametrize("name", ["", ".x", "a/b", "a b", "é", "x" * 129, "../x"])
def test_a_name_is_one_segment_of_a_key(name: str) -> None:
    chain = filled(MemoryStore())
    with pytest.raises(errors.ConfigError, match="is not a name"):
        tags.set_(chain, name, chain.read(2), time=0.0)
    with pytest.raises(errors.ConfigError, match="is not a name"):
        tags.read(chain, name)
    assert tags.check_name("x" * 128)


@pytest.mark.parametrize("kind", STORES)
def test_a_version_without_a_way_is_not_tagged(kind: Callable[[], MemoryStore]) -> None:
    chain = filled(kind())
    tags.set_(chain, "best", chain.read(1), time=0.0)
    chain.store.delete(keys.payload_key("delta", 3, 0, "0" * 32, 0))
    assert [is_reachable(chain, version) for version in range(7)] == [True] * 3 + [False] * 4
    with pytest.raises(errors.BrokenChainError, match="version 4 cannot be rebuilt") as refused:
        tags.set_(chain, "best", chain.read(4), time=1.0)
    assert "the tag was not set" in str(refused.value)
    best = present(tags.read(chain, "best"))
    assert best.version == 1
    chain.store.put(keys.payload_key("delta", 3, 0, "0" * 32, 0), b"pay")  # cut short
    assert not is_reachable(chain, 4)


def test_another_way_counts() -> None:
    chain = filled(MemoryStore())
    edge = Edge(kind="anchor", encodings=("dense",), parts=(part(chain, "anchor", 3),))
    anchor = chain.add_edge(chain.read(3), edge, "")
    chain.store.delete(keys.payload_key("delta", 2, 0, "0" * 32, 0))
    chain = Chain.open(chain.store)
    recent = KnownEdges().after(chain.read(5).manifest, [anchor]).edges
    chain.commit(manifest_after(chain.read(5), recent=recent))
    edges = plan_present(chain, None, chain.read(6)).edges
    assert (edges[0].kind, edges[0].version) == ("anchor", 3)
    assert [is_reachable(chain, version) for version in (1, 2, 5, 6)] == [True, False, True, True]


def test_a_tag_whose_way_is_deleted_while_it_is_set_is_taken_back() -> None:
    """Who prunes read the tags before this one was there, and deletes after it was."""

    class Pruned(MemoryStore):
        def put_if_absent(self, key: str, data: Buffer) -> None:
            super().put_if_absent(key, data)
            if key.startswith("tags/"):
                self.delete(keys.payload_key("delta", 3, 0, "0" * 32, 0))

    chain = filled(Pruned())
    with pytest.raises(errors.BrokenChainError, match="the tag was removed"):
        tags.set_(chain, "best", chain.read(4), time=1.0)
    assert tags.read(chain, "best") is None
    assert tags.read_all(chain) == ()
    assert len(list(chain.store.list("tags/best/"))) == 2


def test_a_tag_that_another_moved_meanwhile_is_not_taken_back() -> None:
    class Moved(MemoryStore):
        chain: Chain

        def put_if_absent(self, key: str, data: Buffer) -> None:
            super().put_if_absent(key, data)
            if key == keys.tag_key("best", 0):
                self.delete(keys.payload_key("delta", 3, 0, "0" * 32, 0))
                tags.set_(self.chain, "best", self.chain.read(1), time=2.0)

    store = Moved()
    chain = store.chain = filled(store)
    with pytest.raises(errors.BrokenChainError):
        tags.set_(chain, "best", chain.read(4), time=1.0)
    best = present(tags.read(chain, "best"))
    assert (best.version, best.number) == (1, 1)


def test_racing_taggers_both_succeed_one_after_the_other() -> None:
    chain, barrier = filled(MemoryStore()), Barrier(2, timeout=60)

    def tag(version: int) -> Tag:
        store = FaultyStore(chain.store, Fault(barrier.wait, "tags/"))  # both found no record
        mine = Chain(store, chain.identity, chain.table)
        return tags.set_(mine, "best", mine.read(version), time=0.0)

    with ThreadPoolExecutor(2) as pool:
        made = sorted(pool.map(tag, range(2)), key=lambda one: one.number)
    assert [one.number for one in made] == [0, 1]
    assert tags.read(chain, "best") == made[1]


def test_a_lost_reply_of_an_own_put_is_recognised() -> None:
    class Lossy(MemoryStore):
        lose = True

        def put_if_absent(self, key: str, data: Buffer) -> None:
            super().put_if_absent(key, data)
            if key.startswith("tags/") and self.lose:
                self.lose = False
                raise errors.StoreUnavailableError("no reply")

    chain = filled(Lossy())
    assert tags.set_(chain, "best", chain.read(4), time=1.0).number == 0
    assert len(list(chain.store.list("tags/"))) == 1


def test_an_overwritten_record_of_a_store_without_races_is_seen() -> None:
    """A second tagger between the check and the put: the number is theirs, ours is the next."""

    class Overwritten(SingleWriterStore):
        other = b""

        def put(self, key: str, data: Buffer) -> str:
            pin = super().put(key, data)
            if key == keys.tag_key("best", 0) and self.other:
                super().put(key, self.other)
            return pin

    store = Overwritten()
    chain = filled(store)
    theirs = tags.set_(filled(MemoryStore()), "best", chain.read(1), time=9.0)
    store.other = seal(theirs)
    assert tags.set_(chain, "best", chain.read(4), time=1.0).number == 1


def test_a_tag_of_a_version_that_is_gone_or_another_says_so() -> None:
    chain = filled(MemoryStore())
    tag = tags.set_(chain, "best", chain.read(5), time=1.0)
    chain.store.delete(keys.manifest_key(5))
    with pytest.raises(errors.StoreWentBackError, match="tag 'best' names version 5"):
        tags.committed(Chain.open(chain.store), tag)
    chain = Chain.open(chain.store)
    chain.commit(manifest_after(chain.read(4), commit_id="other"))
    with pytest.raises(errors.ForkedChainError, match="has another one there"):
        tags.committed(chain, tag)


def test_a_missing_tag_is_refused_with_the_names_of_others() -> None:
    chain = filled(MemoryStore())
    with pytest.raises(errors.ChainError, match="no tag is set"):
        tags.remove(chain, "best", time=0.0)
    tags.set_(chain, "other", chain.read(1), time=0.0)
    with pytest.raises(errors.ChainError, match="tags are other"):
        tags.remove(chain, "best", time=0.0)


def test_records_of_others_and_damaged_ones_are_refused() -> None:
    chain = filled(MemoryStore())
    tag = tags.set_(chain, "best", chain.read(1), time=0.0)
    key = keys.tag_key("best", 0)
    data = chain.store.get(key)
    for changes in ({"chain": "two"}, {"name": "worst"}, {"number": 1}):
        fields = {name: getattr(tag, name) for name in tag.__struct_fields__} | changes
        chain.store.put(key, seal(Tag(**fields)))
        with pytest.raises(errors.MalformedError, match=r"is number|belongs to chain two"):
            tags.read(chain, "best")
    chain.store.put(key, data.replace(b'"time":0', b'"time":1'))
    with pytest.raises(errors.DigestMismatchError):
        tags.read(chain, "best")
