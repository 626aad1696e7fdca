from __future__ import annotations

import importlib.metadata
import re
from dataclasses import fields
from pathlib import Path

import pytest

from deltachain.errors import ConfigError
from deltachain.publish import PublishConfig
from deltachain.publish.quantise.settings import Quantization
from deltachain.publish.ranks.sharing import SCOPES, check_settings, common_settings

DOCS = Path(__file__).parents[3] / "docs" / "sharded-trainers.md"


def test_every_setting_has_a_scope() -> None:
    listed = [name for names in SCOPES.values() for name in names]
    assert sorted(listed) == sorted(field.name for field in fields(PublishConfig))


def test_docs_list_every_setting_by_its_scope() -> None:
    row = re.compile(r"^\| (all ranks|rank 0|each rank) \| (.+?) \|", re.MULTILINE)
    rows = dict(row.findall(DOCS.read_text()))
    listed = {scope: re.findall(r"`(\w+)`", names) for scope, names in rows.items()}
    assert listed["all ranks"].pop() == "every_steps"  # of the training loop
    assert {scope: sorted(names) for scope, names in listed.items()} == {
        scope: sorted(names) for scope, names in SCOPES.items()
    }


def test_equal_settings_pass() -> None:
    one = common_settings(PublishConfig(url="/a"), url="file:///a", further={})
    two = common_settings(PublishConfig(url="/b", part_nbytes=1), url="file:///a", further={})
    check_settings([one, two])


def test_equal_quantisation_passes_however_it_is_given() -> None:
    given: list[str | Quantization] = [
        "int8-row",
        Quantization("int8-row"),
        Quantization("int8-row", ("lm_head", "lm_head")),
    ]
    configs = [PublishConfig(url="/a", quantization=quantization) for quantization in given]
    check_settings([common_settings(config, url="", further={}) for config in configs])


def test_different_folders_of_a_base_pass(tmp_path: Path) -> None:
    configs = [PublishConfig(url="/a", base=tmp_path / name) for name in "ab"]
    check_settings([common_settings(config, url="", further={}) for config in configs])


def test_different_versions_of_a_library_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = PublishConfig(url="/a", quantization="int8-row")
    found = []
    for version in ("0.1", "0.2"):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, version=version: version)
        found.append(common_settings(config, url="", further={}))
    with pytest.raises(ConfigError, match=r"compressed-tensors 0\.1 .*on rank 0.* 0\.2 .*rank 1"):
        check_settings(found)


def test_the_error_names_each_setting_its_values_and_the_ranks() -> None:
    settings = [{"a": "1", "b": "x", "c": "-"}] * 2 + [{"a": "2", "b": "y", "c": "-"}]
    with pytest.raises(ConfigError) as caught:
        check_settings(settings)
    assert caught.value.args[0] == (
        "the ranks have different settings: a is 1 on rank 0, 2 on rank 2; "
        "b is x on rank 0, y on rank 2"
    )


def test_a_setting_that_a_rank_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match="every_steps is 2 on rank 0, absent on rank 1"):
        check_settings([{"every_steps": "2"}, {}])


def test_an_error_of_many_ranks_stays_short() -> None:
    with pytest.raises(ConfigError, match="7 on rank 7") as caught:
        check_settings([{"url": str(rank)} for rank in range(512)])
    assert len(str(caught.value)) < 500
