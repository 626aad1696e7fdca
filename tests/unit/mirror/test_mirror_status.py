"""What a mirror says of itself: whether it does its work, and how long its source is silent."""

from __future__ import annotations

import time
from threading import Event

import pytest

from deltachain.errors import (
    DeltaChainError,
    ForkedChainError,
    ObjectNotFoundError,
    StoreError,
    StorePermissionError,
    StoreUnavailableError,
)
from deltachain.format.keys import manifest_key
from deltachain.mirror import Mirror
from deltachain.mirror.mirror import LOOK_BACK, MirrorTotals, follow
from deltachain.presence.writer import mirror_status
from deltachain.status import Status
from deltachain.store import MemoryStore
from tests.unit.mirror.conftest import Pair, copy_of

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
    totals.looked(StoreUnavailableError("nobody answers"))
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

    def looked(trouble: DeltaChainError | None) -> None:
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


@pytest.mark.parametrize("kind", [ObjectNotFoundError, StorePermissionError, StoreUnavailableError])
def test_a_mirror_that_cannot_write_its_copy_is_not_ready(
    pair: Pair, kind: type[StoreError]
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
    with pytest.raises(ForkedChainError, match=r"version \d of .* differs"):
        list(rounds)


def test_a_hung_write_to_the_mirror_is_silence(source: MemoryStore, totals: MirrorTotals) -> None:
    there = Answering()
    mirror = Mirror(source, there)
    mirror.is_copying = True
    assert totals.silence_of(mirror) == 0.0
    there.waits_since = time.monotonic() - 30
    assert 30 <= totals.silence_of(mirror) < 60


def test_a_long_copy_is_no_silence(totals: MirrorTotals) -> None:
    source = Answering()
    mirror = Mirror(source, MemoryStore())
    assert totals.silence_of(mirror) > 60
    mirror.is_copying = True
    assert totals.silence_of(mirror) == 0.0
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
