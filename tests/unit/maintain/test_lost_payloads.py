"""Payloads that a lifecycle rule or a user deleted: who notices, and how newcomers join again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltachain.chain.chain import Chain, is_reachable
from deltachain.checkpoint import Checkpoint
from deltachain.errors import BrokenChainError, DeltaChainError, ObjectNotFoundError
from deltachain.format.keys import PAYLOADS
from deltachain.maintain import KeepRule, Maintained, Maintainer, Pruner
from deltachain.maintain.added_edges import add_anchor
from deltachain.maintain.survey import Survey
from deltachain.store import MemoryStore, Store
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.support.faults import FaultyStore
from tests.support.values import present
from tests.unit.maintain.grown import SPECS, Grown


def follower(grown: Grown, folder: Path) -> Subscriber:
    return Subscriber(SubscribeConfig(url=grown.store.url), folder, store=grown.store)


def maintained(grown: Grown) -> Maintained:
    return present(Maintainer(Chain.open(grown.store), None).round())


def expire(grown: Grown, chance: random.Random) -> list[str]:
    """Delete what is older than some version, as a rule by age does, or a few objects at random."""
    keys = [info.key for prefix in PAYLOADS for info in grown.store.list(prefix)]
    if chance.random() < 0.5:
        limit = chance.randint(max(0, grown.head - 12), grown.head)
        lost = [key for key in keys if int(key.split("/")[1][:20]) <= limit]
    else:
        lost = chance.sample(keys, min(len(keys), chance.randint(1, 6)))
    for key in lost:
        grown.store.delete(key)
    return lost


def check(grown: Grown, folder: Path) -> None:
    held = Checkpoint(folder)
    for spec in SPECS:
        assert np.array_equal(held.bits(spec.name), grown.bits[-1][spec.name])


@pytest.mark.parametrize("rounds", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_followers_go_on_and_newcomers_come_in_with_an_anchor(tmp_path: Path, rounds: int) -> None:
    """A follower that holds the head applies what is committed next, whatever was deleted."""
    grown, chance = Grown(MemoryStore()), random.Random(7)
    grown.grow(20)
    broken = 0
    with follower(grown, tmp_path / "copy") as ahead:
        ahead.update()
        for number in range(rounds):
            lost = expire(grown, chance)
            grown.grow(chance.randint(1, 3))
            receipt = present(ahead.update())
            assert receipt.version == grown.head
            check(grown, tmp_path / "copy")
            chain = Chain.open(grown.store)
            if not is_reachable(chain, grown.head):
                broken += 1
                with (
                    follower(grown, tmp_path / f"early-{number}") as newcomer,
                    pytest.raises(DeltaChainError) as caught,
                ):
                    newcomer.update()
                assert isinstance(caught.value, BrokenChainError | ObjectNotFoundError)
                assert "restart the publisher" in caught.value.hint
                assert "newcomers cannot reach version" in maintained(grown).failed[0]
                assert lost
                grown.anchor()
            assert is_reachable(chain, grown.head)
            ahead.update()
            with follower(grown, tmp_path / f"late-{number}") as newcomer:
                newcomer.update()
            check(grown, tmp_path / f"late-{number}")
    assert broken > rounds // 4


def test_rounds_look_for_no_lost_payload_again_and_name_it_once() -> None:
    grown = Grown(MemoryStore())
    grown.grow(70)
    grown.chain.write_head(grown.head, [add_anchor(grown.chain, grown.chain.read(40))])
    lost = [key for key in payloads(grown) if key.startswith("deltas/") and version(key) <= 36]
    for key in lost:
        grown.store.delete(key)
    store = CountingReads(grown.store)
    maintainer = Maintainer(Chain.open(store), None)
    first = present(maintainer.round())
    assert [skip.version for skip in first.skips] == [64, 56, 48]
    assert len(first.failed) == 1
    assert "parts of 36 edges, the delta to version 1 first, are gone" in first.failed[0]
    again = present(maintainer.round())
    assert (again.skips, again.failed) == ((), ())
    assert not store.reads & set(lost)


def test_a_lost_anchor_is_planned_around_when_another_is_added() -> None:
    grown = Grown(MemoryStore())
    grown.grow(30)
    grown.chain.write_head(grown.head, [add_anchor(grown.chain, grown.chain.read(16))])
    for key in payloads(grown):
        if key.startswith("anchors/") and version(key) == 16:
            grown.store.delete(key)
    chain = Chain.open(grown.store)
    assert add_anchor(chain, chain.read(24)).version == 24
    assert is_reachable(chain, 24)


@pytest.mark.parametrize("what", ["anchor", "record"])
def test_an_anchor_is_uploaded_once(what: str) -> None:
    """A whole model must not be uploaded for a record that exists."""
    grown = Grown(MemoryStore())
    grown.grow(20)
    head = grown.chain.read(grown.head)
    first = add_anchor(grown.chain, head)
    if what == "record":
        for key in payloads(grown):
            if key.startswith("anchors/") and version(key) == grown.head:
                grown.store.delete(key)
    before = payloads(grown)
    if what == "anchor":
        assert add_anchor(grown.chain, head) == first
    else:
        with pytest.raises(BrokenChainError, match="was recorded before, and its parts are gone"):
            add_anchor(grown.chain, head)
    assert payloads(grown) == before


def payloads(grown: Grown) -> list[str]:
    return [info.key for prefix in PAYLOADS for info in grown.store.list(prefix)]


def version(key: str) -> int:
    return int(key.split("/")[1][:20])


class CountingReads(FaultyStore):
    """Notes the keys that are read."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.reads: set[str] = set()

    def read(self, key: str, **options: Any) -> Any:
        self.reads.add(key)
        return super().read(key, **options)


@pytest.mark.parametrize("lost", [101, 104])
def test_a_skip_around_a_lost_delta_stays_with_the_kept_versions_behind_it(lost: int) -> None:
    """It begins before the newest versions; the way to the head needs a later anchor only."""
    grown = Grown(MemoryStore())
    for anchor, head in ((64, 70), (112, 113)):
        grown.grow(head - grown.head, density=0.01)
        add_anchor(grown.chain, grown.chain.read(anchor))
        Maintainer(grown.chain, None).hint(grown.chain.read(head))
    grown.grow(129 - grown.head, density=0.01)
    Maintainer(Chain.open(grown.store), None).round()
    for info in list(grown.store.list(f"deltas/{lost:020d}")):
        grown.store.delete(info.key)
    reached = [version for version in range(100, 130) if is_reachable(grown.chain, version)]
    assert {*range(104, 130)} <= {*reached}
    pruner = Pruner(Survey(Chain.open(grown.store)), KeepRule(last=30), grace_s=0.0)
    deleted = [pruner.run() for _ in range(2)]
    assert any(plan is not None and plan.due for plan in deleted)
    chain = Chain.open(grown.store)
    assert [version for version in range(100, 130) if is_reachable(chain, version)] == reached
