"""Anchors that neither a manifest nor the head hint lists: readers find them by their keys."""

from __future__ import annotations

import pytest

from deltachain.chain import tags
from deltachain.chain.chain import Chain
from deltachain.maintain import KeepRule, Maintainer, Pruner
from deltachain.maintain.survey import Survey
from deltachain.types import Version
from tests.unit.maintain.grown import Grown
from tests.unit.maintain.pruning import Clock
from tests.unit.maintain.test_prune import check_bits


@pytest.mark.parametrize("tagged", [64, 67])
def test_a_tagged_version_is_reached_by_an_anchor_that_nothing_lists_any_more(
    tagged: Version,
) -> None:
    """The head hint named it as the tag was set; manifests list it from version 72 on."""
    grown = Grown(Clock())
    grown.grow(1)
    survey = Survey(Chain.open(grown.store))
    maintainer = Maintainer(survey.chain, Pruner(survey, KeepRule(last=17), grace_s=5))
    maintainer.anchor_every = 64

    def grow_to(version: Version) -> None:
        while grown.head < version:
            grown.grow(10)
            Clock.now += 6
            maintainer.round()

    grow_to(80)
    tags.set_(grown.chain, "eval", grown.chain.read(tagged), time=0.0)
    grow_to(300)
    check_bits(grown, tagged)
