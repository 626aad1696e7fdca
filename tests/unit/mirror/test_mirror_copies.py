"""What a mirror copies, in which order, and what it leaves out."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import pytest

from deltachain.chain.chain import Chain
from deltachain.chain.mirror_record import read_mirror
from deltachain.errors import (
    BrokenChainError,
    ChainError,
    ChainMismatchError,
    ConfigError,
    ObjectNotFoundError,
    StoreUnavailableError,
)
from deltachain.format.documents import EdgeRecord, Manifest, unseal
from deltachain.format.keys import CHAIN_KEY, HEAD_KEY, MIRROR_KEY, TABLE_KEY, manifest_key
from deltachain.mirror import Mirror, promote
from deltachain.mirror import pipeline as flow
from deltachain.mirror.plan import ObjectCopy
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore
from deltachain.subscribe import Subscriber
from deltachain.testing.faults import Action, Fault, FaultyStore
from deltachain.testing.models import TinyModel, bits_of, recompute, same, tensors_of, train_
from tests.unit.mirror.conftest import Grow, copy_of


class Ordered(MemoryStore):
    """Checks at every write that what a document names is there."""

    def put(self, key: str, data: object) -> str:
        self.written = [*getattr(self, "written", []), key]
        return super().put(key, data)  # type: ignore[arg-type]

    def put_if_absent(self, key: str, data: object) -> None:
        assert isinstance(data, bytes)
        if key.startswith("manifests/"):
            version = unseal(data, Manifest, key=key).version
            assert version == 0 or self.find(manifest_key(version - 1)) is not None
            parts = unseal(data, Manifest, key=key).edge.parts
        elif key.startswith("edges/"):
            parts = unseal(data, EdgeRecord, key=key).edge.parts
        else:
            parts = ()
        assert all(self.find(part.key) is not None for part in parts)
        if key == CHAIN_KEY:
            assert self.find(TABLE_KEY) is not None
            assert self.find(MIRROR_KEY) is not None
        self.written = [*getattr(self, "written", []), key]
        super().put_if_absent(key, data)


def test_a_mirror_has_every_byte_of_its_source(
    source: MemoryStore, mirror_store: MemoryStore, grow: Grow, model: TinyModel
) -> None:
    grow(9)
    receipts = list(Mirror(source, mirror_store).catch_up())
    assert [receipt.version for receipt in receipts] == list(range(10))
    assert receipts[-1].lag_versions == 0
    found = copy_of(mirror_store)
    assert sum(receipt.nbytes for receipt in receipts) == sum(
        len(data) for key, data in found.items() if key not in (MIRROR_KEY, HEAD_KEY)
    )
    found.pop(MIRROR_KEY)
    assert found == copy_of(source)
    tensors = tensors_of(model)
    Subscriber("memory://unused", tensors, store=mirror_store).update()
    assert same(bits_of(tensors), bits_of(model))


def test_a_document_is_put_after_what_it_names_and_the_hint_last(
    source: MemoryStore, grow: Grow
) -> None:
    grow(9, every=1)
    store = Ordered()
    list(Mirror(source, store).catch_up())
    assert store.written[0] == MIRROR_KEY
    assert store.written[-1] == HEAD_KEY


def test_nothing_is_copied_twice(
    source: MemoryStore, mirror_store: MemoryStore, grow: Grow
) -> None:
    grow(5)
    list(Mirror(source, mirror_store).catch_up())
    store = Ordered()
    for key, data in copy_of(mirror_store).items():
        MemoryStore.put(store, key, data)
    reading = FaultyStore(source)
    assert list(Mirror(reading, store).catch_up()) == []
    assert getattr(store, "written", []) == [HEAD_KEY]
    assert not [key for key in reading.keys_read if key.startswith(("deltas/", "anchors/"))]


def test_later_versions_and_late_anchors_follow(
    source: MemoryStore, mirror_store: MemoryStore, grow: Grow
) -> None:
    grow(2)
    mirror = Mirror(source, mirror_store)
    list(mirror.catch_up())
    assert list(mirror.catch_up()) == []
    grow(7, every=2)
    list(mirror.catch_up())
    found = copy_of(mirror_store)
    found.pop(MIRROR_KEY)
    assert found == copy_of(source)
    assert any(key.startswith("edges/") for key in found)


def test_an_interrupted_payload_is_proven_before_it_counts(
    source: MemoryStore, mirror_store: MemoryStore, grow: Grow
) -> None:
    grow(3)
    whole = copy_of(source)
    first, second, *_ = sorted(key for key in whole if key.startswith("deltas/"))
    mirror_store.put(MIRROR_KEY, b"")
    mirror_store.delete(MIRROR_KEY)
    mirror_store.put(first, whole[first])
    mirror_store.put(second, bytes(len(whole[second])))  # of the right length
    reading = FaultyStore(source)
    list(Mirror(reading, mirror_store).catch_up())
    assert first not in reading.keys_read
    assert second in reading.keys_read
    found = copy_of(mirror_store)
    found.pop(MIRROR_KEY)
    assert found == whole


def test_a_mirror_that_lost_objects_heals(
    source: MemoryStore, mirror_store: MemoryStore, grow: Grow
) -> None:
    grow(9)
    list(Mirror(source, mirror_store).catch_up())
    for prefix in ("deltas/00000000000000000003", "anchors/", "edges/", manifest_key(5)):
        for info in list(mirror_store.list(prefix)):
            mirror_store.delete(info.key)
    list(Mirror(source, mirror_store).catch_up())
    found = copy_of(mirror_store)
    found.pop(MIRROR_KEY)
    assert found == copy_of(source)


@pytest.mark.parametrize(("start", "first"), [("head", 8), (7, 4), (3, 0)])
def test_a_mirror_may_hold_less(
    source: MemoryStore,
    mirror_store: MemoryStore,
    grow: Grow,
    model: TinyModel,
    start: Any,
    first: int,
) -> None:
    grow(9)
    list(Mirror(source, mirror_store, start=start, writer="deltachain 1").catch_up())
    record = read_mirror(mirror_store)
    assert record is not None
    assert (record.first, record.source, record.writer) == (first, source.url, "deltachain 1")
    whole, found = copy_of(source), copy_of(mirror_store)
    found.pop(MIRROR_KEY)
    assert all(whole[key] == data for key, data in found.items())
    left = sorted(whole.keys() - found.keys())
    assert all(key.startswith(("deltas/", "anchors/")) for key in left)
    assert all(int(key.split("/")[1][:20]) < first for key in left)
    assert bool(left) == (first > 0)
    tensors = tensors_of(model)
    Subscriber("memory://unused", tensors, store=mirror_store).update()
    assert same(bits_of(tensors), bits_of(model))
    list(Mirror(source, mirror_store).catch_up())  # goes on from where it began
    assert read_mirror(mirror_store) == record


def test_another_start_is_refused(
    source: MemoryStore, mirror_store: MemoryStore, grow: Grow
) -> None:
    grow(9)
    list(Mirror(source, mirror_store, start="head").catch_up())
    with pytest.raises(ConfigError, match="from version 8 on"):
        list(Mirror(source, mirror_store, start=5).catch_up())


def test_payloads_that_the_source_lost_are_left_out_and_named(
    source: MemoryStore,
    mirror_store: MemoryStore,
    grow: Grow,
    model: TinyModel,
    caplog: pytest.LogCaptureFixture,
) -> None:
    grow(9)
    gone = [info.key for info in source.list("deltas/00000000000000000002")]
    for key in gone:
        source.delete(key)
    mirror = Mirror(source, mirror_store)
    with caplog.at_level(logging.WARNING):
        list(mirror.catch_up())
    assert mirror.left_out == set(gone)
    assert f"{gone[0]} is gone from {source.url}" in caplog.text
    tensors = tensors_of(model)
    Subscriber("memory://unused", tensors, store=mirror_store).update()
    assert same(bits_of(tensors), bits_of(model))


def test_of_many_lost_payloads_the_first_are_named(
    source: MemoryStore,
    mirror_store: MemoryStore,
    grow: Grow,
    caplog: pytest.LogCaptureFixture,
) -> None:
    grow(9)
    gone = [info.key for info in source.list("deltas/")][:7]
    for key in gone:
        source.delete(key)
    mirror = Mirror(source, mirror_store)
    with caplog.at_level(logging.WARNING):
        list(mirror.catch_up())
    assert mirror.left_out == set(gone)
    named = [r.getMessage() for r in caplog.records if "is left out" in r.getMessage()]
    assert len(named) == 4
    assert "more are counted at the end" in named[-1]


def test_a_mirror_of_a_mirror_that_holds_less_misses_nothing(
    source: MemoryStore,
    mirror_store: MemoryStore,
    grow: Grow,
    caplog: pytest.LogCaptureFixture,
) -> None:
    grow(9)
    second = MemoryStore()
    list(Mirror(source, mirror_store, start="head").catch_up())
    mirror = Mirror(mirror_store, second)
    with caplog.at_level(logging.WARNING):
        list(mirror.catch_up())
    assert "is left out" not in caplog.text
    assert not mirror.left_out
    record = read_mirror(second)
    assert record is not None
    assert record.first == 8
    assert copy_of(second).keys() == copy_of(mirror_store).keys()


def test_a_start_that_is_not_committed_is_named(
    source: MemoryStore, mirror_store: MemoryStore, grow: Grow
) -> None:
    grow(3)
    with pytest.raises(ChainError, match="does not have version 99") as caught:
        list(Mirror(source, mirror_store, start=99).catch_up())
    assert caught.value.hint == "the head is version 3"
    assert not list(mirror_store.list())


def test_a_mirror_that_no_newcomer_can_join_says_so_and_heals_by_an_anchor(
    source: MemoryStore, mirror_store: MemoryStore, grow: Grow
) -> None:
    grow(5, every=1000)
    for info in list(source.list("anchors/")):
        source.delete(info.key)
    mirror = Mirror(source, mirror_store)
    with pytest.raises(BrokenChainError, match=r"no newcomer can join .* version 5"):
        list(mirror.catch_up())
    assert mirror.version == 5
    grow(1, every=1)
    list(mirror.catch_up())
    assert mirror.version == 7


def test_memory_is_bounded(
    source: MemoryStore,
    mirror_store: MemoryStore,
    grow: Grow,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grow(9)
    largest = max(info.nbytes for info in source.list())
    monkeypatch.setattr(flow, "AHEAD_NBYTES", largest)
    held: list[int] = []

    def measure(copy: ObjectCopy, jobs: list[flow._Job]) -> bool:
        held.append(sum(job.copy.nbytes for job in jobs))
        return has_room(copy, jobs)

    has_room = flow._has_room
    monkeypatch.setattr(flow, "_has_room", measure)
    list(Mirror(source, mirror_store).catch_up())
    assert max(held) <= largest
    found = copy_of(mirror_store)
    found.pop(MIRROR_KEY)
    assert found == copy_of(source)


@pytest.mark.parametrize("do", ["fail", "lose-reply"])
@pytest.mark.parametrize(
    "prefix",
    ["mirror", "table", "assets/", "chain", "deltas/", "anchors/", "edges/", "manifests/", "head"],
)
def test_a_store_that_fails_costs_a_round_and_no_object(
    source: MemoryStore, mirror_store: MemoryStore, grow: Grow, do: Action, prefix: str
) -> None:
    grow(6, every=2)
    faulty = FaultyStore(mirror_store, Fault(do, prefix), Fault(do, prefix, nth=3))
    mirror = Mirror(source, faulty)
    for _ in range(2):
        with suppress(StoreUnavailableError):
            list(mirror.catch_up())
    list(mirror.catch_up())
    assert faulty.struck
    found = copy_of(mirror_store)
    found.pop(MIRROR_KEY)
    assert found == copy_of(source)


def test_a_lost_reply_is_no_failure(
    source: MemoryStore, mirror_store: MemoryStore, grow: Grow
) -> None:
    grow(3)
    faulty = FaultyStore(mirror_store, Fault("own-412", "manifests/"))
    list(Mirror(source, faulty).catch_up())
    assert faulty.struck
    recompute(mirror_store)


def test_a_source_without_a_chain_is_named(source: MemoryStore, mirror_store: MemoryStore) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"chain\.json"):
        list(Mirror(source, mirror_store).catch_up())
    assert list(mirror_store.list()) == []


def test_a_store_with_a_chain_is_no_mirror(
    source: MemoryStore, mirror_store: MemoryStore, grow: Grow
) -> None:
    grow(1)
    grow(1, to=mirror_store)
    before = copy_of(mirror_store)
    with pytest.raises(ConfigError, match="has a chain, and is no mirror"):
        list(Mirror(source, mirror_store).catch_up())
    assert copy_of(mirror_store) == before


def test_a_mirror_has_one_chain(source: MemoryStore, mirror_store: MemoryStore, grow: Grow) -> None:
    other = MemoryStore()
    grow(1)
    grow(1, to=other)
    list(Mirror(source, mirror_store).catch_up())
    with pytest.raises(ChainMismatchError, match="mirrors chain"):
        list(Mirror(other, mirror_store).catch_up())


def test_a_mirror_of_a_mirror_is_the_same(
    source: MemoryStore, mirror_store: MemoryStore, grow: Grow
) -> None:
    grow(5)
    second = MemoryStore()
    list(Mirror(source, mirror_store).catch_up())
    list(Mirror(mirror_store, second).catch_up())
    found = copy_of(second)
    assert found.pop(MIRROR_KEY) != mirror_store.get(MIRROR_KEY)
    assert found == copy_of(source)


def test_publishers_refuse_a_mirror_until_it_is_promoted(
    source: MemoryStore, mirror_store: MemoryStore, grow: Grow, model: TinyModel
) -> None:
    grow(5)
    mirror = Mirror(source, mirror_store)
    list(mirror.catch_up())
    before = copy_of(mirror_store)
    publisher = Publisher(PublishConfig(url=mirror_store.url), store=mirror_store)
    with pytest.raises(ConfigError, match=r"is a mirror of .*nothing is written there") as refused:
        publisher.attach(model)
    assert "--promote" in refused.value.hint
    assert copy_of(mirror_store) == before
    assert promote(mirror_store) == 5
    with Publisher(PublishConfig(url=mirror_store.url), store=mirror_store).attach(model) as again:
        train_(model, 77)
        again.publish()
    with pytest.raises(ConfigError, match="not this mirror any more"):
        list(mirror.catch_up())
    recompute(mirror_store)
    head = Chain.open(mirror_store).head()
    assert head is not None
    assert head.version == 7
    with pytest.raises(ConfigError, match="is no mirror"):
        promote(mirror_store)
