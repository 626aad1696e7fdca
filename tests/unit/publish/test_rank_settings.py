import importlib.metadata
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltachain.errors import ConfigError, StoreUnavailableError
from deltachain.publish import PublishConfig
from deltachain.publish.model.layout import Box, blocks
from deltachain.publish.quantise.settings import Quantization
from deltachain.publish.ranks.collectives import Collective, Ranks
from deltachain.publish.ranks.sharing import (
    SCOPES,
    assign_shards,
    check_cover,
    check_settings,
    common_settings,
)


def test_a_single_rank_gets_its_own_values_and_errors_and_nothing_is_encoded() -> None:
    value, error = object(), StoreUnavailableError("down")  # which JSON does not have
    with Collective(Ranks.alone(), "topic") as collective:
        assert collective.gather(value, object) == [value]
        assert collective.all_gather(value, object) == [value]
        assert collective.broadcast(value, object) is value
    with pytest.raises(StoreUnavailableError) as raised, Collective(Ranks.alone(), "topic"):
        raise error
    assert raised.value is error


def rows(first: int, count: int, of: int = 6) -> Box:
    return Box((of, 2), (first, 0), (count, 2))


def test_every_piece_is_published_once_and_all_ranks_have_work() -> None:
    copies = [{f"w{n}": Box.whole((4, 4)) for n in range(6)} for _ in range(3)]
    owned = assign_shards(copies)
    assert sorted(name for names in owned for name in names) == sorted(copies[0])
    assert [len(names) for names in owned] == [2, 2, 2]


def test_a_shard_is_published_by_a_rank_that_holds_it() -> None:
    holdings = [{"w": rows(0, 3)}, {"w": rows(3, 3)}, {"w": rows(0, 3)}, {"w": rows(3, 3)}]
    owned = assign_shards(holdings)
    published = [holdings[rank]["w"] for rank in range(4) if "w" in owned[rank]]
    assert sorted(published, key=lambda box: box.offset) == [rows(0, 3), rows(3, 3)]


def test_buffers_are_all_of_the_first_rank() -> None:
    copies = [{name: Box.whole((4,)) for name in ("mean", "var", "weight")} for _ in range(2)]
    owned = assign_shards(copies, of_the_first={"mean", "var"})
    assert owned == [{"mean", "var"}, {"weight"}]


def test_an_empty_shard_is_nobodys_and_an_empty_tensor_is_somebodys() -> None:
    owned = assign_shards([{"w": rows(0, 6), "none": Box.whole((0, 2))}, {"w": rows(6, 0)}])
    assert owned == [{"w", "none"}, set()]


@pytest.mark.parametrize(
    ("boxes", "why"),
    [
        ([rows(0, 3)], "not all of it"),
        ([rows(0, 3), rows(4, 2)], "not all of it"),
        ([rows(0, 4), rows(3, 3)], "not all of it"),
        ([Box((2, 2), (0, 0), (1, 1)), Box((2, 2), (1, 1), (1, 1))], "not all of it"),
        ([rows(0, 0)], "not all of it"),
        ([rows(0, 6), Box.whole((5, 2))], "shape"),
    ],
)
def test_pieces_that_are_not_all_or_of_another_shape_are_refused(
    boxes: list[Box], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        check_cover("w", boxes)


def test_rows_columns_copies_and_grids_cover() -> None:
    check_cover("w", [rows(0, 4), rows(4, 2), rows(6, 0)])
    check_cover("w", [rows(0, 6)] * 3)
    check_cover("w", [Box((2, 2), at, (1, 1)) for at in ((0, 0), (0, 1), (1, 0), (1, 1))])
    check_cover("w", [Box((), (), ())])
    check_cover("w", [Box((0, 2), (0, 0), (0, 2))])


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 2), (1, 2, 1, 3)])
def test_boxes_of_a_run_are_its_elements_in_order(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            cut = [box.flat(np.arange(box.numel)) for box in blocks(start, stop, shape)]
            assert np.concatenate([np.arange(0), *cut]).tolist() == list(range(start, stop))
            assert len(cut) <= 2 * len(shape) - 1


def settings_of(url: str = "/a", **settings: Any) -> dict[str, str]:
    return common_settings(PublishConfig(url=url, **settings), url="file:///a", further={})


DOCS = Path(__file__).parents[3] / "docs" / "sharded-trainers.md"


def test_every_setting_has_a_scope() -> None:
    listed = [name for names in SCOPES.values() for name in names]
    assert sorted(listed) == sorted(field.name for field in fields(PublishConfig))


def test_docs_list_every_setting_by_its_scope() -> None:
    item = re.compile(r"^\* (all ranks|rank 0|each rank): (.+(?:\n  .+)*)", re.MULTILINE)
    rows = dict(item.findall(DOCS.read_text()))
    listed = {scope: re.findall(r"`(\w+)`", names) for scope, names in rows.items()}
    assert listed["all ranks"].pop() == "every_steps"  # of the training loop
    assert {scope: sorted(names) for scope, names in listed.items()} == {
        scope: sorted(names) for scope, names in SCOPES.items()
    }


def test_equal_settings_pass_however_they_are_given(tmp_path: Path) -> None:
    check_settings([settings_of(), settings_of("/b", part_nbytes=1)])
    check_settings([settings_of(base=tmp_path / name) for name in "ab"])
    twice = Quantization("int8-row", ("lm_head", "lm_head"))
    given = ["int8-row", Quantization("int8-row"), twice]
    check_settings([settings_of(quantization=quantization) for quantization in given])


def test_different_versions_of_a_library_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for version in ("0.1", "0.2"):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, version=version: version)
        found.append(settings_of(quantization="int8-row"))
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


def test_a_setting_that_a_rank_lacks_is_named_and_an_error_of_many_stays_short() -> None:
    with pytest.raises(ConfigError, match="every_steps is 2 on rank 0, absent on rank 1"):
        check_settings([{"every_steps": "2"}, {}])
    with pytest.raises(ConfigError, match="7 on rank 7") as caught:
        check_settings([{"url": str(rank)} for rank in range(512)])
    assert len(str(caught.value)) < 500
