"""AReaL's FSDP actor publishes in place of its checkpoints on a shared disk; a server follows.

Needs ``pip install 'deltachain[torch]' areal vllm``, and a server, which follows the chain::

    DELTACHAIN_URL=s3://policies/run-1 DELTACHAIN_TOKEN=secret \
      VLLM_PLUGINS=deltachain,deltachain_http \
      vllm serve Qwen/Qwen3-0.6B --worker-extension-cls deltachain_vllm.WorkerExtension \
      --weight-transfer-config '{"backend": "deltachain"}'
    DELTACHAIN_URL=s3://policies/run-1 DELTACHAIN_TOKEN=secret \
      AREAL_LLM_SERVER_ADDRS=127.0.0.1:8000 \
      torchrun --nproc-per-node 2 examples/14_areal.py

``MODEL`` is the name on the Hub or the folder that the server serves. A CPU runs AReaL's actor on
ranks that talk by gloo, and its client of servers. There it ends: AReaL's launchers hand out cards.
With cards, a script that they run on each rank has the line of ``publishing`` before its
``PPOTrainer``, in any ``weight_update_mode``.

Prints a line a step, once the server holds its version.
"""

import asyncio
import os

import areal.engine
import torch
from areal.api import FinetuneSpec, ParallelStrategy
from areal.api.cli_args import (
    GenerationHyperparameters,
    InferenceEngineConfig,
    OptimizerConfig,
    PPOActorConfig,
)
from areal.api.io_struct import ModelRequest, WeightUpdateMeta
from torch import Tensor

from deltachain.integrations.areal import publishing

MODEL = os.environ.get("MODEL", "Qwen/Qwen3-0.6B")
URL = os.environ.get("DELTACHAIN_URL", "s3://policies/run-1")
STEPS = int(os.environ.get("STEPS", "20"))
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
TOKENS, RATE = 16, 1e-5
NAMES = {"experiment_name": "deltachain", "trial_name": "policy"}


def actor() -> areal.engine.FSDPPPOActor:
    """Make AReaL's actor, as its ``PPOTrainer`` does."""
    areal.engine.FSDPPPOActor = publishing(areal.engine.FSDPPPOActor, URL)
    optimizer = OptimizerConfig(type="adam", lr=RATE, lr_scheduler_type="constant")
    given = {"path": MODEL, "optimizer": optimizer, "attn_impl": "sdpa", **NAMES}
    config = PPOActorConfig(backend=f"fsdp:d{RANKS}", **given)
    made = areal.engine.FSDPPPOActor(config)
    made.create_process_group(ParallelStrategy(data_parallel_size=RANKS))
    made.initialize(None, FinetuneSpec(1, dataset_size=STEPS, train_batch_size=1))
    return made


def loss(logprobs: Tensor, *_: object, **__: object) -> Tensor:
    """Learn the answer as it is."""
    return -logprobs.float().mean()


def sample(rollout: areal.engine.RemotevLLMEngine, prompt: list[int]) -> list[int]:
    """Let the server go on, by AReaL's client."""
    how = GenerationHyperparameters(max_new_tokens=TOKENS, ignore_eos=True)
    request = ModelRequest(input_ids=prompt, gconfig=how)
    return asyncio.run(rollout.agenerate(request)).output_tokens


def main() -> None:
    policy = actor()
    rollout = areal.engine.RemotevLLMEngine(InferenceEngineConfig(backend="vllm:d1", **NAMES))
    rollout.initialize(train_data_parallel_size=RANKS)
    meta = WeightUpdateMeta(type="xccl")  # AReaL's default, of which no group is made
    policy.connect_engine(rollout, meta)
    for step in range(1, STEPS + 1):
        prompt = [5 + RANK, 5 + step]
        answer = sample(rollout, prompt)
        tokens = torch.tensor([prompt + answer])
        mask = torch.ones_like(tokens).bool()
        batch = {"input_ids": tokens, "attention_mask": mask, "loss_mask": mask}
        policy.train_batch(batch, loss, lambda given: given["loss_mask"].count_nonzero())
        policy.update_weights(meta.with_version(step))  # returns once the server holds it
        rollout.set_version(step)
        if RANK == 0:
            print(f"step {step}: trained on answers of {len(answer)} tokens; the server holds it")
    rollout.destroy()
    policy.destroy()


if __name__ == "__main__":
    main()
