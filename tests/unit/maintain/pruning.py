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
    """60 versions, with anchors of versions 32 and 48, and skips."""
    made = Grown(Clock())
    made.grow(60)
    for version in (32, 48):
        add_anchor(made.chain, made.chain.read(version))
    Maintainer(made.chain, None).round()
    return made


def finish(pruner: Pruner) -> None:
    pruner.run()
    Clock.now += 3601
    pruner.run()
