from __future__ import annotations

import pytest

from deltachain.errors import ConfigError
from deltachain.publish.model.layout import Box
from deltachain.publish.ranks.sharing import assign_shards, check_cover


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
    assert (owned[1], owned[0]) == (frozenset(), {"w", "none"})


@pytest.mark.parametrize(
    "boxes",
    [
        [rows(0, 3)],
        [rows(0, 3), rows(4, 2)],
        [rows(0, 4), rows(3, 3)],
        [Box((2, 2), (0, 0), (1, 1)), Box((2, 2), (1, 1), (1, 1))],
        [rows(0, 0)],
    ],
)
def test_pieces_that_are_not_all_are_refused(boxes: list[Box]) -> None:
    with pytest.raises(ConfigError, match="not all of it"):
        check_cover("w", boxes)


def test_pieces_of_another_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match="shape"):
        check_cover("w", [rows(0, 6), Box.whole((5, 2))])


def test_rows_columns_copies_and_grids_cover() -> None:
    check_cover("w", [rows(0, 4), rows(4, 2), rows(6, 0)])
    check_cover("w", [rows(0, 6)] * 3)
    check_cover("w", [Box((2, 2), at, (1, 1)) for at in ((0, 0), (0, 1), (1, 0), (1, 1))])
    check_cover("w", [Box((), (), ())])
    check_cover("w", [Box((0, 2), (0, 0), (0, 2))])
