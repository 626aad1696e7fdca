from __future__ import annotations

from pathlib import Path

import pytest

from deltachain.chain import Chain
from deltachain.store import open_store
from deltachain.verify import verify
from tests.ranks.spawn import run

STEPS = 10


pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("rows", 2),
        ("rows", 3),
        ("columns", 2),
        ("hybrid", 4),
        ("tensor_parallel", 4),
        ("copies", 2),
        ("experts", 2),
        ("stages", 2),
    ],
)
def test_every_version_of_a_sharded_model_is_the_gathered_one(
    tmp_path: Path, layout: str, ranks: int
) -> None:
    url = (tmp_path / "chain").as_uri()
    run("tests.ranks.trials:ten_steps", ranks, layout, url, str(tmp_path), 0, STEPS)
    chain = Chain.open(open_store(url))
    assert [proof.version for proof in verify(chain)] == list(range(STEPS + 1))


def test_a_restart_with_another_world_size_continues_the_chain(tmp_path: Path) -> None:
    url = (tmp_path / "chain").as_uri()
    first = 0
    for ranks in (3, 2, 1):
        run("tests.ranks.trials:ten_steps", ranks, "rows", url, str(tmp_path), first, 3)
        first += 3
    epochs = [proof.epoch for proof in verify(Chain.open(open_store(url)))]
    assert sorted(set(epochs)) == [0, 1, 2]
