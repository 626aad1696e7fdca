from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.spawn import run

REFUSALS = [
    ("flat", "FSDP1", "FSDP2"),
    ("fsdp1", "FSDP1", "deltachain push"),
    ("partial", "partial sum", "redistribute"),
    ("unequal", "differs on ranks 0 and 1", "replicas must be equal"),
    ("shape", "on one rank", "DTensors"),
    ("scattered", "rows that are not neighbours", "deltachain push"),
    ("misfit", "this rank holds", "between steps"),
    ("frozen", "is frozen on rank 1, trained on rank 0", "the same weights"),
    ("nothing", "there are no weights", "no rank has any part"),
]


pytestmark = pytest.mark.dist


@pytest.mark.parametrize(("kind", "message", "hint"), REFUSALS)
def test_what_can_not_be_published_is_refused_on_every_rank(
    tmp_path: Path, kind: str, message: str, hint: str
) -> None:
    run("tests.ranks.trials:refused", 2, kind, message, hint, str(tmp_path / "chain"))
