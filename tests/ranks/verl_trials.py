"""What ranks do under verl's engine of Megatron; ``make venv-verl`` has both."""

import asyncio
from pathlib import Path
from typing import Any

import torch
from mbridge.core.bridge import register_model
from torch import Tensor, distributed
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.trainer.config import CheckpointConfig
from verl.utils.import_utils import import_external_libs
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine import EngineRegistry

from tests.ranks.megatron_bridges import LocalQwen3
from tests.ranks.megatron_trials import on_host, stepping
from tests.ranks.transformers_trials import TINY
from tests.ranks.trials import RATE

STEPS = 20


def megatron(rank: int, _: str, url: str, folder: str) -> None:
    """Train with tensor parallelism; verl's gather goes to the checkpoint engine."""
    path = Path(folder) / "base"
    if rank == 0:
        sizes = TINY | {"vocab_size": 64, "head_dim": 8}
        Qwen3ForCausalLM(Qwen3Config(**sizes)).bfloat16().save_pretrained(path)
    distributed.barrier()
    register_model("qwen3")(LocalQwen3)
    with on_host():
        engine = EngineRegistry.new(
            "language_model",
            "megatron",
            HFModelConfig(path=str(path), load_tokenizer=False),
            McoreEngineConfig(
                tensor_model_parallel_size=distributed.get_world_size(),
                sequence_parallel=False,
                vanilla_mbridge=True,
            ),
            McoreOptimizerConfig(lr=RATE, total_training_steps=STEPS),
            CheckpointConfig(),
        )
        engine.initialize()
        step, mine = stepping(engine.module, engine.optimizer), _engines(url, rank)
        for number in range(STEPS):
            step(number)
            asyncio.run(_sync(engine, mine, number))


def _engines(url: str, rank: int) -> list[Any]:
    """Return the checkpoint engine of a rank of the actor; on rank 0 that of a rollout too."""
    import_external_libs("deltachain.integrations.verl")
    given = {"url": url, "bucket_size": 1, "deadline_s": 60}
    actor = CheckpointEngineRegistry.new("deltachain", is_master=rank == 0, **given)
    return [actor, *([] if rank else [CheckpointEngineRegistry.new("deltachain", **given)])]


async def _sync(engine: Any, mine: list[Any], number: int) -> None:
    actor, *rollouts = mine
    given = actor.build_topology(1, 1, [actor.prepare()])[1] if rollouts else {}
    for rollout in rollouts:
        rollout.init_process_group(given["after"][0])
    await actor.send_weights(engine.get_per_tensor_param()[0], global_steps=number)
    expected: dict[str, Tensor] = {n: t.clone() for n, t in engine.get_per_tensor_param()[0]}
    for rollout in rollouts:
        received = {n: t async for n, t in rollout.receive_weights(global_steps=number)}
        assert received.keys() == expected.keys()
        for name, tensor in received.items():  # in bf16
            assert torch.equal(tensor.view(torch.int16), expected[name].view(torch.int16)), name
