"""Mirrors of sources that are pruned."""

import logging
from collections.abc import Iterator
from contextlib import suppress

import pytest

from deltachain.chain.chain import Chain
from deltachain.errors import BrokenChainError, ObjectNotFoundError
from deltachain.format.documents import PrunedRange, PruneRecord, seal
from deltachain.format.keys import HEAD_KEY, MIRROR_KEY, prune_key, version_of
from deltachain.maintain import KeepRule, Maintainer, Pruner
from deltachain.maintain.added_edges import add_anchor
from deltachain.maintain.survey import Survey
from deltachain.mirror import Mirror
from deltachain.mirror import mirror as loop
from deltachain.store import Store
from tests.unit.maintain.grown import Clock, Grown, payloads
from tests.unit.mirror.conftest import copy_of

BESIDE = (MIRROR_KEY, HEAD_KEY)


@pytest.fixture
def grown() -> Iterator[Grown]:
    """40 versions, with an anchor of version 20 and skips."""
    now = Clock.now
    made = Grown(Clock())
    made.grow(40)
    add_anchor(made.chain, made.chain.read(20))
    Maintainer(made.chain, None).round()
    yield made
    Clock.now = now


def prune(grown: Grown) -> None:
    """Write a prune record, wait until its time has come, and delete."""
    Pruner(Survey(Chain.open(grown.store)), KeepRule(last=17), grace_s=3600).run()


def same_but_hints(one: Store, other: Store) -> bool:
    found = [
        {key: data for key, data in copy_of(store).items() if key not in BESIDE}
        for store in (one, other)
    ]
    return found[0] == found[1]


@pytest.mark.parametrize("again", [False, True])
def test_a_mirror_follows_prunes(
    grown: Grown, again: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop, "SURVEY", 4)
    there = Clock()
    mirror = Mirror(grown.store, there)
    list(mirror.catch_up())
    assert same_but_hints(grown.store, there)
    prune(grown)
    for _ in range(4):
        list(mirror.catch_up())
    assert same_but_hints(grown.store, there)
    Clock.now += 3601
    prune(grown)
    assert payloads(there).keys() > payloads(grown.store).keys()
    mirror = Mirror(grown.store, there) if again else mirror
    grown.grow(1)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            list(mirror.catch_up())
    assert same_but_hints(grown.store, there)
    assert not mirror.left_out
    assert not caplog.messages
    Chain.open(there).plan(None, Chain.open(there).read(40))


def test_a_mirror_whose_clock_is_behind_deletes_nothing(
    grown: Grown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the source may have jumped ahead."""
    monkeypatch.setattr(loop, "SURVEY", 1)
    there = Clock()
    mirror = Mirror(grown.store, there)
    list(mirror.catch_up())
    before = payloads(there)
    prune(grown)
    Clock.now += 3601
    prune(grown)
    monkeypatch.setattr(there, "clock", lambda: Clock.now - 3601)
    list(mirror.catch_up())
    assert payloads(there) == before
    monkeypatch.setattr(there, "clock", lambda: Clock.now)
    list(mirror.catch_up())
    assert payloads(there) == payloads(grown.store)


@pytest.mark.full
@pytest.mark.parametrize("again", [False, True])
def test_a_mirror_deletes_the_anchor_that_the_chain_began_with(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No edge record names its parts, but the manifest of version 0."""
    monkeypatch.setattr(loop, "SURVEY", 1)
    grown, there = Grown(Clock()), Clock()
    grown.grow(1)
    first = next(iter(payloads(grown.store)))
    pruner = Pruner(Survey(Chain.open(grown.store)), KeepRule(last=17), grace_s=5)
    maintainer = Maintainer(pruner.survey.chain, pruner, anchor_every=64)
    mirror = Mirror(grown.store, there)
    list(mirror.catch_up())
    assert first in payloads(there)
    while first in payloads(grown.store):
        grown.grow(16)
        Clock.now += 6
        maintainer.round()
    mirror = Mirror(grown.store, there) if again else mirror
    list(mirror.catch_up())
    assert payloads(there) == payloads(grown.store)


def test_a_mirror_that_lost_its_newest_versions_and_old_prune_records_gets_them_again(
    grown: Grown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a mirror does that was restored from a backup while its process went on."""
    monkeypatch.setattr(loop, "SURVEY", 2)
    there = Clock()
    mirror = Mirror(grown.store, there)
    for _ in range(2):
        prune(grown)
        Clock.now += 3601
        grown.grow(1)
    for _ in range(2):
        list(mirror.catch_up())
    for info in list(there.list()):
        if (version_of(info.key) or 0) > 20 or info.key == prune_key(0):
            there.delete(info.key)
    for _ in range(3):
        with suppress(ObjectNotFoundError):
            list(mirror.catch_up())
        grown.grow(1)
    for _ in range(2):
        list(mirror.catch_up())
    assert same_but_hints(grown.store, there)


def test_a_mirror_of_a_pruned_chain_leaves_out_what_is_pruned(
    grown: Grown, caplog: pytest.LogCaptureFixture
) -> None:
    prune(grown)
    Clock.now += 3601
    prune(grown)
    there = Clock()
    mirror = Mirror(grown.store, there)
    with caplog.at_level(logging.WARNING):
        list(mirror.catch_up())
    assert same_but_hints(grown.store, there)
    assert not mirror.left_out
    assert not caplog.messages


def test_nothing_is_deleted_that_the_source_has_or_before_its_time(grown: Grown) -> None:
    there = Clock()
    list(Mirror(grown.store, there).catch_up())
    before = payloads(there)
    prune(grown)
    assert payloads(grown.store) == before
    first = next(iter(before))
    grown.store.delete(first)  # by somebody else, before its time
    list(Mirror(grown.store, there).catch_up())
    assert payloads(there) == before
    Clock.now += 3601  # pruned, but the source has the rest
    list(Mirror(grown.store, there).catch_up())
    assert before.keys() - payloads(there).keys() <= {first}


def test_a_source_that_is_pruned_while_it_is_copied_is_no_loss(
    grown: Grown, caplog: pytest.LogCaptureFixture
) -> None:
    there = Clock()
    mirror = Mirror(grown.store, there)
    with caplog.at_level(logging.WARNING):
        for receipt in mirror.catch_up():
            if receipt.version == 0:  # after the mirror looked for prune records
                prune(grown)
                Clock.now += 3601
                prune(grown)
        list(Mirror(grown.store, there).catch_up())
    assert same_but_hints(grown.store, there)
    assert not mirror.left_out
    assert not caplog.messages


def test_a_record_that_prunes_everything_deletes_no_way_of_newcomers(grown: Grown) -> None:
    there, chain = Clock(), grown.chain
    list(Mirror(grown.store, there).catch_up())
    before = payloads(there)
    rows = (
        PrunedRange(kind="anchor", span=0, first=0, last=39, after=1.0),
        PrunedRange(kind="delta", span=1, first=0, last=39, after=1.0),
    )
    record = PruneRecord(
        chain=chain.identity.chain, number=0, head=39, maintainer="m", time=1.0, pruned=rows
    )
    for key in before:
        grown.store.delete(key)
    grown.store.put(prune_key(0), seal(record))
    for _ in range(2):
        with suppress(BrokenChainError):
            list(Mirror(grown.store, there).catch_up())
    assert payloads(there) == before
