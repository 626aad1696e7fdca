from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.spawn import run

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("trial", ["trainer_with_copies", "accelerate_with_shards"])
def test_what_trainers_of_transformers_and_accelerate_hold_is_published(
    tmp_path: Path, trial: str
) -> None:
    url = (tmp_path / "chain").as_uri()
    run(f"tests.ranks.transformers_trials:{trial}", 2, url, str(tmp_path))


@pytest.mark.parametrize("kind", ["qwen3_moe", "hrm_text", "inkling2_text", "llava"])
def test_what_is_converted_when_it_is_saved_loads_and_computes_the_same(
    tmp_path: Path, kind: str
) -> None:
    url = (tmp_path / "chain").as_uri()
    run("tests.ranks.transformers_trials:converted", 2, kind, url, str(tmp_path))
