"""Runs in AReaL's environment, by path: its FSDP actor and its client of servers, on a CPU.

Prints a line a step, and waits for one.
"""

import asyncio
import os
import sys
from typing import Any

from tests.unit.integrations.lockstep import Ranks, tell  # isort: skip  # before others log

import torch
from areal.api import FinetuneSpec, ParallelStrategy
from areal.api.cli_args import (
    GenerationHyperparameters,
    InferenceEngineConfig,
    OptimizerConfig,
    PPOActorConfig,
)
from areal.api.io_struct import ModelRequest, WeightUpdateMeta
from areal.engine import FSDPPPOActor, RemotevLLMEngine
from torch import Tensor

from deltachain.integrations.areal import publishing
from examples.demo.online.processes import free_port
from tests.engines.trainer import save

STEPS, RANKS, RATE = 20, 2, 1e-3
NAMES = {"experiment_name": "deltachain", "trial_name": "trial"}


def loss(logits: Tensor, *_: Any, **__: Any) -> Tensor:
    return -logits.float().square().mean()


class Rank:
    def __init__(self, path: str, url: str, address: str) -> None:
        torch.set_num_threads(1)
        os.environ["AREAL_LLM_SERVER_ADDRS"] = address  # as AReaL's launchers do
        optimizer = OptimizerConfig(type="adam", lr=RATE, lr_scheduler_type="constant")
        made = {"path": path, "optimizer": optimizer, "attn_impl": "sdpa", **NAMES}
        config = PPOActorConfig(backend=f"fsdp:d{RANKS}", **made)
        self.actor = publishing(FSDPPPOActor, url)(config)
        self.actor.create_process_group(ParallelStrategy(data_parallel_size=RANKS))
        spec = FinetuneSpec(total_train_epochs=1, dataset_size=STEPS, train_batch_size=1)
        self.actor.initialize(None, spec)
        self.rollout = RemotevLLMEngine(InferenceEngineConfig(backend="vllm:d1", **NAMES))
        self.rollout.initialize(train_data_parallel_size=RANKS)
        self.meta = WeightUpdateMeta(type="disk", path=f"{path}-never")
        self.actor.connect_engine(self.rollout, self.meta)

    def step(self, version: int) -> None:
        torch.manual_seed(version)
        tokens = torch.randint(3, 500, (2, 32))
        masks = dict.fromkeys(("attention_mask", "loss_mask"), torch.ones_like(tokens).bool())
        batch = {"input_ids": tokens, **masks}
        self.actor.train_batch(batch, loss, lambda given: given["loss_mask"].count_nonzero())
        self.actor.update_weights(self.meta.with_version(version))
        self.rollout.set_version(version)

    def generated(self) -> int:
        how = GenerationHyperparameters(max_new_tokens=4, ignore_eos=True)
        request = ModelRequest(input_ids=[5, 6, 7], gconfig=how)
        return len(asyncio.run(self.rollout.agenerate(request)).output_tokens)

    def save(self, folder: str) -> None:
        save(self.actor.model, folder)

    def stop(self) -> None:
        self.rollout.destroy()
        self.actor.destroy()


def main() -> None:
    path, url, address = sys.argv[1:]
    ranks = Ranks(RANKS, free_port(), lambda _: Rank(path, url, address))
    for step in range(1, STEPS + 1):
        ranks.each("step", step)
        ranks.each("save", f"{path}-{step}")
        tell(ranks.each("generated")[0])
    ranks.each("stop")


if __name__ == "__main__":
    main()
