from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.spawn import run

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    "trial", ["experts_of_transformers", "trainer_with_copies", "accelerate_with_shards"]
)
def test_what_transformers_and_accelerate_shard_is_published(tmp_path: Path, trial: str) -> None:
    url = (tmp_path / "chain").as_uri()
    run(f"tests.ranks.transformers_trials:{trial}", 2, url, str(tmp_path))
