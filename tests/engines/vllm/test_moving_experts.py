"""Experts that vLLM's own balancer moves: written where they are, or the swap is refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from deltachain.checkpoint import WEIGHTS_FILE
from deltachain.errors import ExpertsMovedError
from deltachain.replica.layout.model_state import LoadMethod, load_with
from tests.engines.families import checkpoint
from tests.engines.matrix import copied, differences, live
from tests.engines.two_ranks import two_ranks
from tests.engines.vllm.fresh import load_moving

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("ranks", "times"), [(1, 200), (2, 40)])
def test_experts_that_move_are_found(ranks: int, times: int) -> None:
    examine = "tests.engines.moving:examine"
    found, *_ = two_ranks(examine, ranks, times, deadline_s=3600, ranks=ranks)
    assert (found["wrong"], found["another state"], found["differs"]) == (0, 0, [[]] * ranks)
    assert found["refused"] >= times // 2


def test_nothing_is_staged_while_another_thread_moves_experts() -> None:
    """It has read weights that it writes when it is done."""
    how = {"rank": 0, "ranks": 1, "redundant": 2}
    with load_moving(checkpoint("qwen3_moe"), **how) as (known, _, move):
        balancer: Any = vars(known)["_balancer"]
        state = next(iter(balancer.model_states.values()))
        state.rebalanced = True
        with pytest.raises(ExpertsMovedError, match="is moving experts"):
            known.slots()
        state.rebalanced = False
        move([[3, 2, 1, 0, 3, 3], [0, 1, 2, 3, 0, 1]])
        assert list(known.slots().values()) == [(3, 2, 1, 0, 3, 3), (0, 1, 2, 3, 0, 1)]


@pytest.mark.parametrize("way", ["loaded", "reloaded", "repacked"])
def test_every_way_of_loading_finds_experts(way: LoadMethod, tmp_path: Path) -> None:
    before, how = checkpoint("qwen3_moe"), {"rank": 0, "ranks": 1, "redundant": 2}
    other = {
        name: tensor.flip(0) if ".experts." in name else tensor
        for name, tensor in load_file(before / WEIGHTS_FILE).items()
    }
    shutil.copytree(before, tmp_path / "after")
    save_file(other, tmp_path / "after" / WEIGHTS_FILE, metadata={"format": "pt"})
    rows = [[3, 2, 1, 0, 3, 3], [2, 0, 2, 3, 2, 1]]
    with load_moving(tmp_path / "after", **how) as (_, model, move):
        move(rows)
        wanted = copied(live(model))
    with load_moving(before, **how) as (known, model, move):
        move(rows)
        tensors = [(name, tensor) for name, tensor in other.items() if ".experts." in name]
        layers = frozenset(layer for layer in known.modules() if layer.endswith("routed_experts"))
        load_with(known, way, layers, tensors)
        assert differences(wanted, copied(live(model))) == []
