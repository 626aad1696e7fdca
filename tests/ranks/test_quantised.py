from __future__ import annotations

from pathlib import Path

import pytest

from deltachain.chain.chain import Chain
from deltachain.publish.quantise.settings import RECIPES
from deltachain.store import open_store
from tests.ranks.spawn import run

STEPS = 3

pytestmark = pytest.mark.dist


def states(folder: Path, model: str, recipe: str, ranks: int, dim: int = 0) -> list[str]:
    url = (folder / f"{model}-{recipe}-{ranks}-{dim}").as_uri()
    run("tests.ranks.quantised_trials:publishes", ranks, model, recipe, dim, url, STEPS)
    chain = Chain.open(open_store(url))
    return [chain.identity.table, *(chain.read(v).manifest.state for v in range(STEPS + 1))]


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_ranks_publish_what_one_process_does(tmp_path: Path, recipe: str) -> None:
    one = states(tmp_path, "layers", recipe, 1)
    assert len(set(one)) == STEPS + 2
    assert states(tmp_path, "layers", recipe, 2) == one
    assert states(tmp_path, "layers", recipe, 3) == one
    assert states(tmp_path, "layers", recipe, 3, 1) == one, "by columns"


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-tensor", "int8-row", "nvfp4a16"])
def test_ranks_share_experts(tmp_path: Path, recipe: str) -> None:
    one = states(tmp_path, "mixture", recipe, 1)
    for dim in range(3):
        assert states(tmp_path, "mixture", recipe, 2, dim) == one, dim


@pytest.mark.parametrize("recipe", ["fp8-block", "nvfp4a16"])
@pytest.mark.parametrize("spoilt", [0, 1])
def test_weights_that_are_not_finite_stop_every_rank(
    tmp_path: Path, spoilt: int, recipe: str
) -> None:
    run("tests.ranks.quantised_trials:refuses", 2, recipe, (tmp_path / "chain").as_uri(), spoilt)


def test_a_cut_between_codes_of_one_byte_is_refused_by_every_rank(tmp_path: Path) -> None:
    run("tests.ranks.quantised_trials:splits_bytes", 3, (tmp_path / "chain").as_uri())
    assert not list(tmp_path.rglob("chain.json"))
