"""A chain to prune, on a store whose clock is set by the test."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from deltachain.chain.chain import Chain
from deltachain.maintain import KeepRule, Maintainer, Pruner
from deltachain.maintain.added_edges import add_anchor
from deltachain.maintain.survey import Survey
from deltachain.store import MemoryStore, ObjectInfo
from deltachain.types import Version
from tests.unit.maintain.grown import Grown


class Clock(MemoryStore):
    """A store whose clock is set by the test."""

    now = 1_000_000.0

    def find(self, key: str) -> ObjectInfo | None:
        info = super().find(key)
        return replace(info, modified=self.now) if info else None


def pruner_of(grown: Grown, *, tagged: Iterable[Version] = (), **rule: Any) -> Pruner:
    survey = Survey(Chain.open(grown.store))
    return Pruner(survey, KeepRule(**rule), grace_s=3600, tagged=lambda _: tagged)


def grow_sixty() -> Grown:
    """60 versions, with anchors of versions 24 and 40, and skips."""
    made = Grown(Clock())
    made.grow(60)
    for version in (24, 40):
        add_anchor(made.chain, made.chain.read(version))
    Maintainer(made.chain, None).round()
    return made


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


def finish(pruner: Pruner) -> None:
    pruner.run()
    Clock.now += 3601
    pruner.run()
