"""What ranks do under DeepSpeed; ``make venv-trainers`` has it."""

import os
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, distributed, nn

import deltachain
from tests.ranks.trials import RATE, VOCAB, WIDTH, Block, Model, attaches, publishes


def _join(rank: int) -> None:
    # Messages by gloo: operators of its own for a host would be compiled for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    ranks = distributed.get_world_size()
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    os.environ.update({name: str(number) for name, number in where.items()})
    deepspeed.init_distributed("gloo")


def _config(stage: str, *, accumulate: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulate,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": int(stage[0]),
            "stage3_param_persistence_threshold": 50 if "persistent" in stage else 0,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
    }


def zero(rank: int, stage: str, url: str, folder: str) -> None:
    """Train under a stage of ZeRO, ``3 persistent`` with small parameters whole on every rank."""
    _join(rank)
    config = _config(stage, accumulate=2 if stage == "2" else 1)
    engine, *_ = deepspeed.initialize(model=Model(), config=config)

    def export() -> dict[str, Tensor]:
        parameters = dict(engine.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            whole = {name: one.detach().clone() for name, one in parameters.items()}
        return whole | dict(engine.module.named_buffers())

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(10 * number + rank)
        for _ in range(engine.gradient_accumulation_steps()):
            tokens = torch.randint(0, VOCAB, (2, 9), generator=generator)
            logits = engine(tokens[:, :-1]).flatten(0, 1).float()
            engine.backward(nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))
            engine.step()

    publishes(rank, engine, step, export, url, folder)
    attaches(rank, partial(deltachain.attach, engine), step, export, url, folder)


def pipeline(rank: int, stages: str, url: str, folder: str) -> None:
    """Train stages of DeepSpeed's pipeline, whose first and last layer are tied."""
    _join(rank)
    torch.manual_seed(0)
    embedding = partial(TiedLayerSpec, "tied", nn.Embedding, VOCAB, WIDTH)
    net = PipelineModule(
        [
            embedding(),
            LayerSpec(Block),
            LayerSpec(Block),
            embedding(forward_fn=lambda module, x: x @ module.weight.T),
        ],
        num_stages=int(stages),
        loss_fn=lambda logits, wanted: nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), wanted.flatten()
        ),
        partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(model=net, config=_config("1", accumulate=2))
    replica = engine.grid.get_data_parallel_rank()

    def export() -> dict[str, Tensor]:
        mine = {name: one.detach() for name, one in engine.module.named_parameters()}
        found: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(found, mine)
        return {name: one for held in found for name, one in held.items()}

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(10 * number + replica)
        tokens = torch.randint(0, VOCAB, (2, 2, 9), generator=generator)
        engine.train_batch((one[:, :-1], one[:, 1:]) for one in tokens)

    publishes(rank, engine, step, export, url, folder)
    attaches(rank, partial(deltachain.attach, engine), step, export, url, folder)
