"""What ranks do under verl's engines of FSDP and Megatron; ``make venv-verl`` has both."""

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mbridge.core.bridge import register_model
from tensordict import TensorDict
from torch import Tensor, distributed
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.utils.import_utils import import_external_libs
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
)
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import sft_loss

from tests.ranks.megatron_bridges import LocalQwen3
from tests.ranks.megatron_trials import on_host, stepping
from tests.ranks.transformers_trials import TINY
from tests.ranks.trials import RATE

STEPS = 20


class Host(PlatformCUDA):  # type: ignore[misc]
    """The host as a platform of verl's."""

    device_name, device_module = "cpu", torch.cpu

    def current_device(self) -> torch.device:
        return torch.device("cpu")


def fsdp2(rank: int, _: str, url: str, folder: str) -> None:
    """Train by verl's engine and loss; its gather goes to the checkpoint engine."""
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # it is registered for cards alone
    set_platform(Host())
    attention = {"attn_implementation": "sdpa"}  # by default that of a card
    model = HFModelConfig(
        path=_saved(rank, folder), load_tokenizer=False, override_config=attention
    )
    engine = EngineRegistry.new(
        "language_model",
        "fsdp2",
        model,
        FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False),
        FSDPOptimizerConfig(lr=RATE, total_training_steps=STEPS),
        CheckpointConfig(),
    )
    engine.initialize()
    mine = _engines(url, rank, dtype="BF16")
    for number in range(STEPS):
        with engine.train_mode():
            engine.train_batch(_batch(number, rank), partial(sft_loss, None))
        asyncio.run(_sync(engine, mine, number))


def _batch(number: int, rank: int) -> TensorDict:
    torch.manual_seed(10 * number + rank)
    rows = {
        "input_ids": [torch.randint(3, 61, (length,)) for length in (8, 6)],
        "position_ids": [torch.arange(length) for length in (8, 6)],
        "loss_mask": [torch.ones(length) for length in (8, 6)],
    }
    jagged = {k: torch.nested.as_nested_tensor(v, layout=torch.jagged) for k, v in rows.items()}
    data = TensorDict(jagged, batch_size=2)
    sizes = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "temperature": 1.0}
    tensordict_utils.assign_non_tensor(data, use_remove_padding=False, **sizes)
    return data


def megatron(rank: int, _: str, url: str, folder: str) -> None:
    """Train with tensor parallelism; verl's gather goes to the checkpoint engine."""
    register_model("qwen3")(LocalQwen3)
    with on_host():
        engine = EngineRegistry.new(
            "language_model",
            "megatron",
            HFModelConfig(path=_saved(rank, folder), load_tokenizer=False),
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


def _saved(rank: int, folder: str) -> str:
    path = Path(folder) / "base"
    if rank == 0:
        sizes = TINY | {"vocab_size": 64, "head_dim": 8}
        Qwen3ForCausalLM(Qwen3Config(**sizes)).bfloat16().save_pretrained(path)
    distributed.barrier()
    return str(path)


def _engines(url: str, rank: int, **settings: Any) -> list[Any]:
    """Return the checkpoint engine of a rank of the actor; on rank 0 that of a rollout too."""
    import_external_libs("deltachain.integrations.verl")
    given = {"url": url, "bucket_size": 1, "deadline_s": 60, **settings}
    actor = CheckpointEngineRegistry.new("deltachain", is_master=rank == 0, **given)
    return [actor, *([] if rank else [CheckpointEngineRegistry.new("deltachain", **given)])]


async def _sync(engine: Any, mine: list[Any], number: int) -> None:
    actor, *rollouts = mine
    given = actor.build_topology(1, 1, [actor.prepare()])[1] if rollouts else {}
    for rollout in rollouts:
        rollout.init_process_group(given["after"][0])
    metrics = await actor.send_weights(engine.get_per_tensor_param()[0], global_steps=number)
    assert not (rollouts and number) or metrics["deltachain/changed_frac"] > 0
    exported = engine.get_per_tensor_param()[0]
    expected: dict[str, Tensor] = {name: one.bfloat16().clone() for name, one in exported}
    for rollout in rollouts:
        received = {n: t async for n, t in rollout.receive_weights(global_steps=number)}
        assert received.keys() == expected.keys()
        for name, tensor in received.items():
            assert torch.equal(tensor.view(torch.int16), expected[name].view(torch.int16)), name
