"""Totals of a chain, and spans of time on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltachain.cli.prune import seconds
from deltachain.errors import ConfigError
from deltachain.store import FileStore
from tests.unit.cli.support import invoke
from tests.unit.maintain.grown import Grown


def test_objects_are_summed_up_by_kind_and_readers_are_planned_for(tmp_path: Path) -> None:
    grown = Grown(FileStore(tmp_path))
    grown.grow(12)
    infos = list(grown.store.list(""))
    report = invoke("stats", tmp_path, "--json").document
    found = {kind["kind"]: kind for kind in report["kinds"]}
    sizes = [kind["nbytes"] for kind in report["kinds"]]
    assert sizes == sorted(sizes, reverse=True)
    assert report["nbytes"] == sum(sizes) == sum(info.nbytes for info in infos)
    assert (found["manifests"]["objects"], found["deltas"]["objects"]) == (12, 11)
    assert [reader["age"] for reader in report["readers"]] == [None, 1, 10]
    assert all(reader["edges"] for reader in report["readers"])
    for info in infos:
        if info.key.startswith("anchors/"):
            grown.store.delete(info.key)
    report = invoke("stats", tmp_path, "--json").document
    assert report["readers"][0]["edges"] is None


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
