"""RLinf's weight syncers and ours are right where the documents say so, and only there."""

from pathlib import Path

import pytest

from tests.peers.syncers import CASES, KINDS, run

FRAMEWORKS = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"


@pytest.mark.peers
@pytest.mark.parametrize("kind", KINDS)
def test_a_syncer_is_as_right_as_the_table_says(kind: str, tmp_path: Path) -> None:
    rows = [line.strip("| ").split(" | ") for line in FRAMEWORKS.read_text().splitlines()]
    said = {name: dict(zip(KINDS, cells, strict=True)) for name, *cells in rows if name in CASES}
    found = run(kind, tmp_path)
    assert {name: found[name] for name in CASES} == {name: said[name][kind] for name in CASES}
