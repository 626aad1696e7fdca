"""Table of replicas on a terminal with few lines."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from deltachain.cli.fleet import replica_table
from deltachain.control.comparison import compare
from deltachain.errors import ControlPlaneError
from deltachain.status import HealthLimits

COUNT = 50
ROWS = compare(
    {f"http://r{n}:8000": ControlPlaneError("did not answer") for n in range(COUNT)}, HealthLimits()
)


def drawn(width: int, height: int | None) -> list[str]:
    out = Console(file=io.StringIO(), width=width, height=height or 25)
    with out.capture() as told:
        out.print(replica_table(ROWS, 0, width, height))
    return [line.rstrip() for line in told.get().splitlines()]


@pytest.mark.parametrize("width", [30, 80, 200])
@pytest.mark.parametrize("height", [10, 24])
def test_the_summary_is_shown_however_low_the_terminal(width: int, height: int) -> None:
    lines = drawn(width, height)
    assert len(lines) <= height
    whole = drawn(width, None)
    assert lines[:4] == whole[:4]
    assert "50 failed" in " ".join(line.strip() for line in lines[-3:])
    assert any(line == "..." for line in lines)


@pytest.mark.parametrize("height", [None, 300])
def test_all_are_drawn_where_there_is_room(height: int | None) -> None:
    lines = drawn(80, height)
    assert sum("http://" in line for line in lines) == COUNT
    assert not any(line == "..." for line in lines)
