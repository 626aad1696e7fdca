"""Pruned edges that a survey forgets: a long-lived pruner decides as a new one does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from deltachain.chain.chain import Chain
from deltachain.chain.reachable import is_reachable
from deltachain.errors import AlreadyExistsError, ChainError
from deltachain.format.documents import closes
from deltachain.format.keys import edge_key, payload_key
from deltachain.maintain import KeepRule, Maintainer, PrunePlan, Pruner
from deltachain.maintain.added_edges import add_anchor
from deltachain.maintain.keep import ranges
from deltachain.maintain.survey import Survey
from deltachain.types import Version
from tests.unit.maintain.grown import Grown
from tests.unit.maintain.pruning import Clock
from tests.unit.maintain.test_prune import check_bits, is_whole, payloads

KEPT = 20


def pruner_of(grown: Grown, tagged: set[Version], last: int = KEPT) -> Pruner:
    survey = Survey(Chain.open(grown.store))
    return Pruner(survey, KeepRule(last=last), grace_s=5, tagged=lambda _: sorted(tagged))


class Life:
    """A chain with a maintainer that lives as long as it, and accidents.

    Args:
        seed: Seed of the accidents.
    """

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.grown = Grown(Clock())
        self.tagged: set[Version] = set()
        self.grow(3)
        self.pruner = pruner_of(self.grown, self.tagged)
        self.maintainer = Maintainer(self.pruner.survey.chain, self.pruner, anchor_every=64)
        self.once: dict[str, bytes] = {}

    def grow(self, versions: int) -> None:
        self.grown.grow(versions, density=0.01)

    def some_version(self) -> Version:
        return int(self.random.integers(1, self.grown.head + 1))

    def tag(self) -> None:
        self.tagged.add(self.some_version())

    def untag(self) -> None:
        self.tagged.clear()

    def orphan(self) -> None:
        kind: Any = self.random.choice(["delta", "skip", "anchor"])
        key = payload_key(kind, self.some_version(), 0, "0" * 31 + str(self.random.integers(9)), 0)
        self.grown.store.put(key, b"orphan")

    def restore(self) -> None:
        """A backup puts back payloads that were deleted."""
        for key in sorted(self.once):
            if self.random.random() < 0.1 and self.grown.store.find(key) is None:
                self.grown.store.put(key, self.once[key])

    def lose_record(self) -> None:
        """One that is not pruned: the range of a pruned one stays, which harms nobody."""
        version = max(self.some_version(), self.grown.head - 10) // 8 * 8
        self.grown.store.delete(edge_key(version, "skip", max(version - 8, 0)))

    def unreadable_record(self) -> None:
        version = self.some_version() // 8 * 8
        key = edge_key(version, "skip", max(version - 64, 0))
        if self.grown.store.find(key) is None:
            self.grown.store.put(key, b"{}")

    def other_rule(self) -> None:
        """Another maintainer with another rule does a round."""
        pruner_of(self.grown, self.tagged, last=int(self.random.integers(17, 40))).run()

    def turn(self) -> None:
        """Grow, perhaps meet an accident, and do a round of maintenance."""
        accidents: list[Callable[[], None]] = [
            self.tag,
            self.untag,
            self.orphan,
            self.restore,
            self.lose_record,
            self.unreadable_record,
            self.other_rule,
        ]
        self.grow(int(self.random.integers(1, 12)))
        for key in payloads(self.grown.store):
            self.once.setdefault(key, self.grown.store.get(key))
        if self.random.random() < 0.7:
            accidents[self.random.integers(len(accidents))]()
        Clock.now += float(self.random.integers(0, 8))


class HarderLife(Life):
    """More accidents, several between two rounds, and a second maintainer that lives too."""

    second: Maintainer | None = None

    def zero(self) -> None:
        """Versions without changes, whose deltas have no parts."""
        for _ in range(int(self.random.integers(1, 12))):
            self.grown.commit(0.0)

    def tag_reachable(self) -> None:
        for _ in range(10):
            version = self.some_version()
            if is_reachable(Chain.open(self.grown.store), version):
                self.tagged.add(version)
                return

    def untag_one(self) -> None:
        if self.tagged:
            self.tagged.discard(sorted(self.tagged)[self.random.integers(len(self.tagged))])

    def second_round(self) -> None:
        if self.second is None or self.random.random() < 0.2:
            pruner = pruner_of(self.grown, self.tagged)
            self.second = Maintainer(pruner.survey.chain, pruner, anchor_every=64)
        self.second.round()

    def lose_skip(self) -> None:
        keys = sorted(payloads(self.grown.store))
        key = keys[self.random.integers(len(keys))]
        if key.startswith("skips"):
            self.grown.store.delete(key)

    def restore_all(self) -> None:
        for key, data in self.once.items():
            if self.grown.store.find(key) is None:
                self.grown.store.put(key, data)

    def add_anchor(self) -> None:
        with suppress(ChainError):
            chain = Chain.open(self.grown.store)
            add_anchor(chain, chain.read(self.some_version()))

    def pause(self) -> None:
        self.grow(int(self.random.integers(40, 120)))

    def turn(self) -> None:
        """Grow, meet accidents, and leave the round of maintenance to the caller."""
        accidents: list[Callable[[], None]] = [
            *(self.tag_reachable, self.tag_reachable, self.untag, self.untag_one, self.orphan),
            *(self.restore, self.restore_all, self.lose_record, self.unreadable_record),
            *(self.other_rule, self.zero, self.second_round, self.second_round, self.lose_skip),
            *(self.add_anchor, self.pause),
        ]
        self.grow(int(self.random.integers(1, 12)))
        for key in payloads(self.grown.store):
            self.once.setdefault(key, self.grown.store.get(key))
        for _ in range(int(self.random.integers(0, 3))):
            accidents[self.random.integers(len(accidents))]()
        Clock.now += float(self.random.integers(0, 8))


def decided(pruner: Pruner) -> dict[str, Any]:
    """What a pruner decides: objects by key, edges, and the rows of the next record."""
    plan = pruner.plan()
    assert plan is not None
    found = {one.name: getattr(plan, one.name) for one in fields(PrunePlan)}
    for name in ("due", "waiting", "orphans"):
        found[name] = {info.key for info in found[name]}
    rows = ranges(plan.edges, plan.after, plan.time, pruner.survey.forgotten)
    past = {(row.kind, row.span, row.first, row.last, max(row.after, plan.time)) for row in rows}
    kept = {edge for edge in plan.edges if edge not in plan.after}
    return {name: found[name] for name in ("retired", "due", "waiting", "orphans")} | {
        "rows": past,
        "kept": kept,
    }


@pytest.mark.parametrize(
    ("seed", "life_of"),
    [
        (0, Life),
        (105, HarderLife),
        *(pytest.param(seed, Life, marks=pytest.mark.slow) for seed in range(1, 6)),
        pytest.param(110, HarderLife, marks=pytest.mark.slow),
    ],
)
def test_a_pruner_that_forgets_decides_as_one_that_has_just_read_everything(
    seed: int, life_of: type[Life]
) -> None:
    life = life_of(seed)
    most = 0
    for _ in range(30):
        life.turn()
        assert decided(life.pruner) == decided(pruner_of(life.grown, life.tagged))
        life.maintainer.round()
        check_bits(life.grown, life.grown.head)
        most = max(most, sum(row.last - row.first + 1 for row in life.pruner.survey.forgotten))
    assert most > 50


def test_the_edges_held_in_memory_do_not_grow_with_the_chain() -> None:
    life = Life(0)
    held = []
    for _ in range(60):
        life.grow(10)
        Clock.now += 10
        life.maintainer.round()
        head = life.pruner.survey.chain.read(life.grown.head)
        held.append(len(life.pruner.survey.edges(head)))
    assert max(held[30:]) < 128  # of 700
    check_bits(life.grown, life.grown.head)


def test_an_edge_that_is_restored_and_tagged_stays() -> None:
    """The ranges of later records do not cover it."""
    life = Life(0)
    life.grow(120)
    once = {key: life.grown.store.get(key) for key in payloads(life.grown.store)}
    add_anchor(life.grown.chain, life.grown.chain.read(96))
    for _ in range(3):
        Clock.now += 10
        life.maintainer.round()
    assert closes(life.pruner.survey.forgotten, 40)
    for key, data in once.items():
        if life.grown.store.find(key) is None:
            life.grown.store.put(key, data)
    life.tagged.add(40)
    for _ in range(3):
        Clock.now += 10
        life.maintainer.round()
    assert not closes(life.pruner.survey.forgotten, 40)
    assert is_whole(life.grown.chain, 40)  # nothing deletes it, and no plan of a reader has it


def test_parts_of_a_record_that_was_lost_and_made_again_are_no_orphans() -> None:
    """Another maintainer made it again between two rounds of this one."""
    life = Life(0)
    life.grow(60)
    life.maintainer.round()
    other = Maintainer(Chain.open(life.grown.store), None)
    key = edge_key(56, "skip", 48)
    lost = life.grown.chain.store.get(key)
    life.grown.store.delete(key)
    other.round()
    assert life.grown.store.get(key) != lost
    there = other.survey.objects().keys()
    assert [life.maintainer.round() for _ in range(2)]
    skip = other.survey.edges(life.grown.chain.read(life.grown.head))
    parts = other.survey.parts_of(edge for edge in skip if edge.record == key)
    assert {part for found in parts.values() for part in found or ()} <= payloads(
        life.grown.store
    ).keys() & there


def test_a_record_is_not_written_after_another_that_its_plan_does_not_know() -> None:
    """It would take back what the other retired, or retire again what the other kept."""
    life = Life(0)
    life.grow(150)
    life.maintainer.round()
    life.grow(16)
    plan = life.pruner.plan()
    assert plan is not None
    pruner_of(life.grown, life.tagged, last=100).run()
    with pytest.raises(AlreadyExistsError):
        life.pruner.record(plan)


class Backup:
    """What a store and its trainer hold, to go on from there again."""

    def __init__(self, grown: Grown) -> None:
        self.objects = {info.key: grown.store.get(info.key) for info in grown.store.list()}
        self.random, self.parent = grown.random.bit_generator.state, grown.parent
        self.bits, self.added = list(grown.bits), grown.added

    def restore(self, grown: Grown) -> None:
        for info in list(grown.store.list()):
            grown.store.delete(info.key)
        for key, data in self.objects.items():
            grown.store.put(key, data)
        grown.random.bit_generator.state, grown.parent = self.random, self.parent
        grown.bits, grown.added = list(self.bits), self.added


def test_a_store_that_was_restored_keeps_what_a_trainer_publishes_again() -> None:
    """Its versions have the same bits and summaries as before, and parts of other keys."""
    grown = Grown(Clock())
    grown.grow(30)
    backup = Backup(grown)
    grown.grow(10)
    key = payload_key("delta", 35, 0, "0" * 32, 0)
    grown.store.put(key, b"orphan")  # of a trainer that was killed: all parts are looked at
    pruner = pruner_of(grown, set())
    assert {info.key for info in pruner.run().orphans} == {key}  # type: ignore[union-attr]
    backup.restore(grown)
    grown.grow(10)
    before = payloads(grown.store)
    plan = pruner.run()
    assert plan is not None
    assert not plan.orphans
    assert payloads(grown.store) == before
    check_bits(grown, 39)


def test_prune_records_go_on_from_those_of_a_store_that_was_restored() -> None:
    """A gap between their numbers would hide the newest one from all others."""
    life = Life(0)

    def round_after(versions: int) -> None:
        life.grow(versions)
        Clock.now += 10
        life.maintainer.round()

    for _ in range(8):
        round_after(16)
    backup = Backup(life.grown)
    for _ in range(4):
        round_after(16)
    backup.restore(life.grown)
    for _ in range(2):
        round_after(16)
        known, chain = life.pruner.survey.chain.prunes.newest(), Chain.open(life.grown.store)
        assert chain.prunes.newest() == known is not None
        assert decided(life.pruner) == decided(pruner_of(life.grown, life.tagged))
