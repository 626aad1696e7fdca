import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from threading import Event
from typing import Any

import pytest

from deltachain import errors
from deltachain.chain import tags
from deltachain.chain.chain import Chain
from deltachain.chain.identity import read_mirror
from deltachain.format.documents import EdgeRecord, Manifest, unseal
from deltachain.format.keys import (
    CHAIN_KEY,
    HEAD_KEY,
    MIRROR_KEY,
    PAYLOADS,
    TABLE_KEY,
    manifest_key,
)
from deltachain.mirror import Mirror, promote
from deltachain.mirror import copies as flow
from deltachain.mirror import mirror as loop
from deltachain.mirror.copies import ObjectCopy
from deltachain.mirror.mirror import LOOK_BACK, MirrorTotals, follow
from deltachain.presence.writer import mirror_status
from deltachain.publish import PublishConfig, Publisher
from deltachain.status import Status
from deltachain.store import MemoryStore
from tests.support.faults import Action, Fault, FaultyStore
from tests.support.models import recompute, train_
from tests.support.values import present
from tests.unit.mirror.conftest import Pair, copy_of


@pytest.mark.parametrize("key", [CHAIN_KEY, TABLE_KEY])
def test_a_mirror_that_follows_restores_a_lost_identity_within_a_look_back(
    pair: Pair, key: str
) -> None:
    pair.grow(1)
    mirror = pair.mirror()
    list(mirror.catch_up())
    pair.there.delete(key)
    for _ in range(LOOK_BACK):
        list(mirror.catch_up())
    assert pair.there.get(key) == pair.source.get(key)


def test_a_source_that_lost_its_chain_is_not_waited_for(pair: Pair) -> None:
    pair.grow(1)
    pair.copy()
    with pytest.raises(errors.ObjectNotFoundError, match="is lost"):
        list(Mirror(MemoryStore(), pair.there).catch_up())


GIVEN = {"MAX_SILENCE_S": 60.0, "MAX_LAG": 2}


class Answering(MemoryStore):
    """A source that says since when a request has no answer."""

    waits_since: float | None = None

    @property
    def unanswered_since(self) -> float | None:
        return self.waits_since


@pytest.fixture
def totals(monkeypatch: pytest.MonkeyPatch) -> MirrorTotals:
    """Totals of a mirror that began two minutes ago."""
    made = MirrorTotals()
    monkeypatch.setattr(made, "_since", time.monotonic() - 120)
    return made


def test_a_mirror_that_is_cut_off_from_its_source_is_not_ready(
    pair: Pair, totals: MirrorTotals
) -> None:
    pair.grow(1)
    mirror = pair.mirror()
    assert mirror_status(mirror, totals, GIVEN, url="x").reason.startswith("it holds no version")
    for receipt in mirror.catch_up():
        totals.count(receipt)
    assert mirror_status(mirror, totals, GIVEN, url="x").ready
    totals._since -= 61
    totals.looked(errors.StoreUnavailableError("nobody answers"))
    status = mirror_status(mirror, totals, GIVEN, url="x")
    assert "its store has not answered for 61 s" in status.reason
    assert mirror_status(mirror, totals, {}, url="x").ready
    totals.looked(None)
    assert mirror_status(mirror, totals, GIVEN, url="x").ready


@pytest.mark.parametrize("lost", ["manifests/00000000000000000003", "anchors/"])
def test_a_mirror_whose_source_lost_something_is_not_ready_until_it_is_back(
    pair: Pair, lost: str
) -> None:
    """However many rounds pass, most of which look at the newest version alone."""
    pair.grow(3, every=100)
    if "manifests" in lost:
        pair.copy()
    backup = {info.key: pair.source.get(info.key) for info in pair.source.list(lost)}
    for key in backup:
        pair.source.delete(key)
    mirror, totals, stop = pair.mirror(), MirrorTotals(), Event()
    seen = list[Status]()

    def looked(trouble: errors.DeltaChainError | None) -> None:
        totals.looked(trouble)
        seen.append(mirror_status(mirror, totals, {}, url="x"))
        if len(seen) == 20:
            for key, data in backup.items():
                pair.source.put(key, data)
        if seen[-1].ready or len(seen) > 300:
            stop.set()

    for receipt in follow(mirror, stop=stop, poll_s=0.001, looked=looked):
        totals.count(receipt)
    assert 20 < len(seen) < 300
    assert all(one.reason == one.trouble.split("\n")[0] != "" for one in seen[:20])


@pytest.mark.parametrize(
    "kind", [errors.ObjectNotFoundError, errors.StorePermissionError, errors.StoreUnavailableError]
)
def test_a_mirror_that_cannot_write_its_copy_is_not_ready(
    pair: Pair, kind: type[errors.StoreError]
) -> None:
    pair.grow(2)
    mirror, totals = pair.mirror(), MirrorTotals()
    for receipt in mirror.catch_up():
        totals.count(receipt)
    assert mirror_status(mirror, totals, {}, url="x").ready
    totals.looked(kind("its copy is gone", url=pair.there.url))
    assert mirror_status(mirror, totals, {}, url="x").reason == "its copy is gone"


def test_a_mirror_finds_another_history_of_its_source_in_a_few_rounds(pair: Pair) -> None:
    pair.grow(2)
    backup, mirror = copy_of(pair.source), pair.mirror()
    pair.grow(1)
    list(mirror.catch_up())
    for key in copy_of(pair.source).keys() - backup.keys():
        pair.source.delete(key)
    pair.grow(1)
    pair.source.delete(manifest_key(mirror.version + 1))  # as many versions, the newest another one
    rounds = (receipt for _ in range(LOOK_BACK) for receipt in mirror.catch_up())
    with pytest.raises(errors.ForkedChainError, match=r"version \d of .* differs"):
        list(rounds)


def test_a_long_copy_is_no_silence_but_a_hung_read_or_write_is(totals: MirrorTotals) -> None:
    source, there = Answering(), Answering()
    mirror = Mirror(source, there)
    assert totals.silence_of(mirror) > 60
    mirror.is_copying = True
    assert totals.silence_of(mirror) == 0.0
    there.waits_since = time.monotonic() - 30
    assert 30 <= totals.silence_of(mirror) < 60
    source.waits_since = time.monotonic() - 90
    assert totals.silence_of(mirror) > 60


def test_a_mirror_says_while_it_copies(pair: Pair) -> None:
    pair.grow(3)
    mirror = pair.mirror()
    receipts = mirror.catch_up()
    next(receipts)
    assert mirror.is_copying
    assert len(list(receipts)) == 3
    assert not mirror.is_copying


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


def test_a_mirror_has_every_byte_of_its_source(pair: Pair) -> None:
    pair.grow(9)
    receipts = pair.copy()
    assert [receipt.version for receipt in receipts] == list(range(10))
    assert receipts[-1].lag_versions == 0
    found = copy_of(pair.there)
    assert sum(receipt.nbytes for receipt in receipts) == sum(
        len(data) for key, data in found.items() if key not in (MIRROR_KEY, HEAD_KEY)
    )
    pair.check()
    pair.check_newcomer()


def test_a_document_is_put_after_what_it_names_and_the_hint_last(pair: Pair) -> None:
    pair.grow(9, every=1)
    store = Ordered()
    list(Mirror(pair.source, store).catch_up())
    assert (store.written[0], store.written[-1]) == (MIRROR_KEY, HEAD_KEY)


def test_nothing_is_copied_twice(pair: Pair) -> None:
    pair.grow(5)
    pair.copy()
    store = Ordered()
    for key, data in copy_of(pair.there).items():
        MemoryStore.put(store, key, data)
    reading = FaultyStore(pair.source)
    assert list(Mirror(reading, store).catch_up()) == []
    assert getattr(store, "written", []) == [HEAD_KEY]
    assert not [key for key in reading.keys_read if key.startswith(("deltas/", "anchors/"))]


def test_an_interrupted_payload_is_proven_before_it_counts(pair: Pair) -> None:
    pair.grow(3)
    whole = copy_of(pair.source)
    first, second, *_ = sorted(key for key in whole if key.startswith("deltas/"))
    pair.there.put(first, whole[first])
    pair.there.put(second, bytes(len(whole[second])))  # of the right length
    reading = FaultyStore(pair.source)
    list(Mirror(reading, pair.there).catch_up())
    assert first not in reading.keys_read
    assert second in reading.keys_read
    assert pair.copied() == whole


def test_a_mirror_that_lost_objects_heals(pair: Pair) -> None:
    pair.grow(9)
    pair.copy()
    for prefix in ("deltas/00000000000000000003", "anchors/", "edges/", manifest_key(5)):
        for info in list(pair.there.list(prefix)):
            pair.there.delete(info.key)
    pair.copy()
    pair.check()


@pytest.mark.parametrize(("start", "first"), [("head", 8), (7, 4), (3, 0)])
def test_a_mirror_may_hold_less(pair: Pair, start: Any, first: int) -> None:
    pair.grow(9)
    pair.copy(start=start, writer="deltachain 1")
    record = present(read_mirror(pair.there))
    assert (record.first, record.source, record.writer) == (first, pair.source.url, "deltachain 1")
    whole, found = copy_of(pair.source), pair.copied()
    assert all(whole[key] == data for key, data in found.items())
    left = sorted(whole.keys() - found.keys())
    assert all(key.startswith(("deltas/", "anchors/")) for key in left)
    assert all(int(key.split("/")[1][:20]) < first for key in left)
    assert bool(left) == (first > 0)
    pair.check_newcomer()
    pair.copy()  # goes on from where it began
    assert read_mirror(pair.there) == record


def test_another_start_is_refused(pair: Pair) -> None:
    pair.grow(9)
    pair.copy(start="head")
    with pytest.raises(errors.ConfigError, match="from version 8 on"):
        pair.copy(start=5)


@pytest.mark.parametrize(("lost", "named"), [(1, 1), (7, 4)])
def test_payloads_that_the_source_lost_are_left_out_and_the_first_are_named(
    pair: Pair, caplog: pytest.LogCaptureFixture, lost: int, named: int
) -> None:
    pair.grow(9)
    gone = [info.key for info in pair.source.list("deltas/")][1 : 1 + lost]
    for key in gone:
        pair.source.delete(key)
    mirror = pair.mirror()
    with caplog.at_level(logging.WARNING):
        list(mirror.catch_up())
    assert mirror.left_out == set(gone)
    assert f"{gone[0]} is gone from {pair.source.url}" in caplog.text
    said = [text for text in caplog.messages if "is left out" in text]
    assert len(said) == named
    assert ("more are counted at the end" in said[-1]) is (named < lost)
    pair.check_newcomer()


@pytest.mark.parametrize(("start", "first"), [(0, 0), ("head", 8)])
def test_a_mirror_of_a_mirror_holds_the_same_and_misses_nothing(
    pair: Pair, caplog: pytest.LogCaptureFixture, start: Any, first: int
) -> None:
    pair.grow(9)
    second = MemoryStore()
    pair.copy(start=start)
    mirror = Mirror(pair.there, second)
    with caplog.at_level(logging.WARNING):
        list(mirror.catch_up())
    assert "is left out" not in caplog.text
    assert not mirror.left_out
    record = present(read_mirror(second))
    assert (record.first, record.source) == (first, pair.there.url)
    found = copy_of(second)
    del found[MIRROR_KEY]
    assert found == pair.copied()


def test_a_start_that_is_not_committed_is_named(pair: Pair) -> None:
    pair.grow(3)
    with pytest.raises(errors.ChainError, match="does not have version 99") as caught:
        pair.copy(start=99)
    assert caught.value.hint == "the head is version 3"
    assert not list(pair.there.list())


def test_a_mirror_that_no_newcomer_can_join_says_so_and_heals_by_an_anchor(pair: Pair) -> None:
    pair.grow(5, every=1000)
    for info in list(pair.source.list("anchors/")):
        pair.source.delete(info.key)
    mirror = pair.mirror()
    with pytest.raises(errors.BrokenChainError, match=r"no newcomer can join .* version 5"):
        list(mirror.catch_up())
    assert mirror.version == 5
    pair.grow(1, every=1)
    list(mirror.catch_up())
    assert mirror.version == 7


def test_memory_is_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.grow(9)
    largest = max(info.nbytes for info in pair.source.list())
    monkeypatch.setattr(flow, "AHEAD_NBYTES", largest)
    held: list[int] = []
    batches = flow.batches

    def measured(copies: Iterable[ObjectCopy]) -> Iterator[list[ObjectCopy]]:
        for batch in batches(copies):
            held.append(sum(copy.nbytes for copy in batch))
            yield batch

    monkeypatch.setattr(flow, "batches", measured)
    pair.copy()
    assert max(held) <= largest
    pair.check()


@pytest.mark.parametrize("restarts", [False, True])
def test_documents_that_a_killed_writer_left_empty_are_copied_again(
    pair: Pair, restarts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SURVEY", 1)
    pair.grow(20)
    chain = Chain.open(pair.source)
    tags.set_(chain, "best", chain.read(3), time=1.0)
    mirror = pair.mirror()
    list(mirror.catch_up())
    whole = copy_of(pair.there)
    for key in whole:
        if not key.startswith(PAYLOADS) and key not in (MIRROR_KEY, HEAD_KEY):
            pair.there.put(key, b"")
    mirror = pair.mirror() if restarts else mirror
    list(mirror.catch_up())
    assert copy_of(pair.there) == whole


FAILING = ("mirror", "table", "assets/", "chain", "deltas/", "anchors/", "edges/", "manifests/")


@pytest.mark.parametrize(
    ("do", "prefix"),
    [
        *(("fail", prefix) for prefix in (*FAILING, "head")),
        *(("lose-reply", prefix) for prefix in (*FAILING, "head")),
        ("own-412", "manifests/"),
    ],
)
def test_a_store_that_fails_costs_a_round_and_no_object(
    pair: Pair, do: Action, prefix: str
) -> None:
    pair.grow(6, every=2)
    faulty = FaultyStore(pair.there, Fault(do, prefix), Fault(do, prefix, nth=3))
    mirror = Mirror(pair.source, faulty)
    for _ in range(0 if do == "own-412" else 2):  # which is no failure
        with suppress(errors.StoreUnavailableError):
            list(mirror.catch_up())
    list(mirror.catch_up())
    assert faulty.struck
    pair.check()


def test_a_source_without_a_chain_is_named(pair: Pair) -> None:
    with pytest.raises(errors.ObjectNotFoundError, match=r"chain\.json"):
        pair.copy()
    assert list(pair.there.list()) == []


def test_a_store_with_a_chain_is_no_mirror(pair: Pair) -> None:
    pair.grow(1)
    pair.grow(1, to=pair.there)
    before = copy_of(pair.there)
    with pytest.raises(errors.ConfigError, match="has a chain, and is no mirror"):
        pair.copy()
    assert copy_of(pair.there) == before


def test_a_mirror_has_one_chain(pair: Pair) -> None:
    other = MemoryStore()
    pair.grow(1)
    pair.grow(1, to=other)
    pair.copy()
    with pytest.raises(errors.ChainMismatchError, match="mirrors chain"):
        list(Mirror(other, pair.there).catch_up())


def test_publishers_refuse_a_mirror_until_it_is_promoted(pair: Pair) -> None:
    pair.grow(5)
    mirror = pair.mirror()
    list(mirror.catch_up())
    before = copy_of(pair.there)
    publisher = Publisher(PublishConfig(url=pair.there.url), store=pair.there)
    with pytest.raises(
        errors.ConfigError, match=r"is a mirror of .*nothing is written there"
    ) as refused:
        publisher.attach(pair.model)
    assert "--promote" in refused.value.hint
    assert copy_of(pair.there) == before
    assert promote(pair.there) == 5
    with Publisher(PublishConfig(url=pair.there.url), store=pair.there).attach(pair.model) as again:
        train_(pair.model, 77)
        again.publish()
    with pytest.raises(errors.ConfigError, match="not this mirror any more"):
        list(mirror.catch_up())
    recompute(pair.there)
    head = present(Chain.open(pair.there).head())
    assert head.version == 7
    with pytest.raises(errors.ConfigError, match="is no mirror"):
        promote(pair.there)
