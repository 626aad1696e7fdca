from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks.spawn import run

pytestmark = pytest.mark.dist


def test_followers_of_one_job_hold_what_its_trainers_published(tmp_path: Path) -> None:
    run("tests.ranks.trials:direct", 4, str(tmp_path))
    facts = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert facts[0]["states"] == facts[1]["states"]
    for follower in facts[2:]:
        seen = {int(version): state for version, state in follower["states"].items()}
        assert seen[5] == facts[0]["states"][4]
        assert all(state == facts[0]["states"][v - 1] for v, state in seen.items() if v)


def test_the_store_of_a_job_keeps_the_contract(tmp_path: Path) -> None:
    run("tests.ranks.contract:one_rank", 1, str(tmp_path))
