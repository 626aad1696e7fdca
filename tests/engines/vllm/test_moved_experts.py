"""Experts that move between the slots of a stock vLLM's tensors, as EPLB moves them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

from deltachain.checkpoint import Checkpoint
from deltachain.errors import BaseMismatchError, ConfigError, EngineDamagedError
from deltachain.replica.rank import Rank
from deltachain_vllm.model import VllmModel
from tests.engines.families import checkpoint
from tests.engines.matrix import Change, attached, changed
from tests.engines.vllm.fresh import known, load_in_context
from tests.support.spools import spool_of

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("mode", ["enable_eplb", "enable_elastic_ep"])
def test_modes_that_move_experts_are_refused_in_each_worker(mode: str) -> None:
    from vllm.config import ParallelConfig  # noqa: PLC0415

    assert getattr(ParallelConfig(), mode) is False
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(**{mode: True}))
    with pytest.raises(ConfigError, match=f"--{mode.replace('_', '-')}"):
        VllmModel(nn.Linear(1, 1), config)


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_version_is_not_written_over_experts_that_moved(is_mapped: bool, tmp_path: Path) -> None:
    before = checkpoint("qwen3_moe")
    specs = dict(Checkpoint(before).specs)
    with load_in_context(before, plain_linears=False) as (config, model):
        engine = known(config, model)
        layer: Any = next(m for m in model.modules() if hasattr(m, "w13_weight"))
        if is_mapped:
            count = len(layer.w13_weight)
            layer.register_buffer("_expert_map", layer.w13_weight.new_tensor(range(count)).int())
        rank = Rank(engine, specs.values(), {})
        agreement = attached(rank, specs, 0, 1)
        after = changed(specs, agreement, before, tmp_path / "after")
        spool = spool_of(tmp_path / "spool", Change(specs, agreement, before, after).deltas())
        rank.stage(1, spool.folder, 1 << 30)
        rank.check_addresses()
        turned: list[Tensor] = [layer.w13_weight, layer.w2_weight]
        for tensor in turned + [layer._expert_map] * is_mapped:
            tensor.data.copy_(tensor.data.flip(0).clone())
        held = {name: tensor.clone() for name, tensor in engine.tensors().items()}
        with pytest.raises(EngineDamagedError if is_mapped else BaseMismatchError):
            rank.swap(1, 1, back=False)
        assert all(tensor.equal(held[name]) for name, tensor in engine.tensors().items())
        if is_mapped:
            assert not rank.loads_the_same()  # the experts are where they were, their map is not
            with pytest.raises(EngineDamagedError):
                rank.check_addresses()
