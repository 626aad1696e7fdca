"""Tables in a narrow terminal: columns are left out, and nothing is cut."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from deltachain.cli import console as c
from tests.unit.cli.support import Pushed, ok


@pytest.mark.parametrize("columns", [30, 40, 60])
@pytest.mark.parametrize(
    "words", [["stats"], ["verify"], ["inspect"], ["inspect", "--table"], ["log"]]
)
def test_no_unit_is_cut(
    pushed: Pushed, monkeypatch: pytest.MonkeyPatch, words: list[str], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    command, *options = words
    shown = ok(command, pushed.url, *options).stdout
    assert "…" not in shown
    tables = [line for line in shown.splitlines() if not line.startswith("✓")]
    assert max(map(cell_len, tables)) <= columns
    assert " B" in shown or " kB" in shown


def rows(width: int, *give_way: str) -> list[str]:
    cells = ("weights of a layer", "1.25 kB", "12.5 %", c.bar(0.5, 10))
    grid = c.table(("name", ">bytes", ">share", ""), [cells], *give_way, width=width)
    console = c.out()
    with console.capture() as captured:
        console.print(grid, width=width)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_a_bar_gives_way_first_then_columns_in_turn() -> None:
    assert rows(60, "share")[1].split("  ")[-1].startswith("█")
    assert rows(36, "share") == [
        "name                  bytes   share",
        "weights of a layer  1.25 kB  12.5 %",
    ]
    assert rows(30, "share") == ["name                  bytes", "weights of a layer  1.25 kB"]


def test_cells_are_folded_where_no_column_is_left_to_leave_out() -> None:
    shown = " ".join(" ".join(rows(20, "share")).split())
    assert "…" not in shown
    assert all(word in shown for word in ("weights", "layer", "1.25 kB"))
