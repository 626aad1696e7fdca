"""What ranks do under DeepSpeed; ``make venv-trainers`` has it."""

import os
from functools import partial

import deepspeed
import torch
from torch import Tensor, distributed, nn

import deltachain
from tests.ranks.trials import RATE, VOCAB, Model, attaches, publishes


def zero(rank: int, stage: str, url: str, folder: str) -> None:
    """Train under a stage of ZeRO, ``3 persistent`` with small parameters whole on every rank."""
    # Messages by gloo: operators of its own for a host would be compiled for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    ranks = distributed.get_world_size()
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    os.environ.update({name: str(number) for name, number in where.items()})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2 if stage == "2" else 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": int(stage[0]),
            "stage3_param_persistence_threshold": 50 if "persistent" in stage else 0,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
    }
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
