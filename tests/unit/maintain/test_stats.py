"""Totals of a chain, and spans of time on the command line."""

from __future__ import annotations

import pytest

from deltachain.cli.prune import seconds
from deltachain.errors import ConfigError
from deltachain.maintain.survey import reader_plans, totals
from deltachain.store import MemoryStore
from tests.unit.cli.support import invoke
from tests.unit.maintain.grown import Grown


def test_objects_are_summed_up_by_kind_and_readers_are_planned_for() -> None:
    grown = Grown(MemoryStore())
    grown.grow(12)
    infos = list(grown.store.list(""))
    found = {total.kind: total for total in totals(infos)}
    assert sum(total.nbytes for total in found.values()) == sum(info.nbytes for info in infos)
    assert (found["manifests"].objects, found["deltas"].objects) == (12, 11)
    ways = reader_plans(grown.chain, grown.chain.read(11))
    assert [way.age for way in ways] == [None, 1, 10]
    assert all(way.plan is not None for way in ways)
    for info in infos:
        if info.key.startswith("anchors/"):
            grown.store.delete(info.key)
    assert reader_plans(grown.chain, grown.chain.read(11))[0].plan is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("90s", 90), ("1.5h", 5400), ("7d", 604800), ("2 w", 1209600)],
)
def test_spans_of_time(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "-1s", "7x", "soon", "1e3"])
def test_what_is_no_span_of_time_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a span of time") as caught:
        seconds(text)
    assert "30m" in caught.value.hint


@pytest.mark.parametrize("option", ["--keep-last", "--keep-every"])
def test_a_rule_of_nothing_is_refused(option: str) -> None:
    assert invoke("prune", "memory:", option, 0).code == 2
