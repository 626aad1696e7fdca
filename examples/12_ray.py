"""Ray Train's workers publish their shards; vLLM in an actor on another node follows them.

Needs ``pip install 'deltachain[torch]' 'ray[train]' vllm``, and a cluster::

    ray start --head
    ray start --address HEAD:6379 --resources '{"engine": 1}'  # on the node of the engine
    DELTACHAIN_URL=s3://policies/run-1 python examples/12_ray.py

``MODEL`` is a name on the Hub, or a folder that all nodes have. Without ``DELTACHAIN_URL`` the
chain is in a temporary folder, for nodes on one machine. With ``GPUS=1`` each worker and the actor
have a card. A CPU runs all but that: ranks then talk by gloo. Prints, at each step, which version
sampled what it trains on, and at last what the engine holds.

SGLang follows in the same way: ``deltachain_sglang.follow`` takes an ``Engine``.
"""

import os
import tempfile
import uuid
from typing import Any, ClassVar

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import deltachain

MODEL = os.environ.get("MODEL", "Qwen/Qwen3-0.6B")
URL = os.environ.get("DELTACHAIN_URL") or tempfile.mkdtemp()
STEPS = int(os.environ.get("STEPS", "20"))
GPUS = int(os.environ.get("GPUS", "0"))


class Replica:
    """An engine that samples with the newest version it has."""

    settings: ClassVar[dict[str, Any]] = {"dtype": "bfloat16", "max_model_len": 256}

    def __init__(self, model: str) -> None:
        self.model = model

    async def follow(self, url: str) -> None:
        """Start, in the event loop of the actor, and take versions as they are committed."""
        from vllm import AsyncEngineArgs  # noqa: PLC0415 - only its node has vLLM
        from vllm.config import WeightTransferConfig  # noqa: PLC0415
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        import deltachain_vllm  # noqa: PLC0415

        given = {"worker_extension_cls": "deltachain_vllm.WorkerExtension", **self.settings}
        backend = WeightTransferConfig(backend="deltachain")
        arguments = AsyncEngineArgs(self.model, weight_transfer_config=backend, **given)
        self.engine = AsyncLLM.from_engine_args(arguments)
        self.leader = deltachain_vllm.follow(self.engine, url)

    async def sample(self, prompt: list[int]) -> tuple[str, list[int]]:
        """Return the version of the weights, and their tokens."""
        from vllm import SamplingParams  # noqa: PLC0415

        tokens, version = list[int](), await self.engine.get_weight_version()
        how = SamplingParams(max_tokens=16, temperature=1.0, ignore_eos=True)
        request = {"prompt_token_ids": prompt}
        async for output in self.engine.generate(request, how, str(uuid.uuid4())):
            tokens = list(output.outputs[0].token_ids)
        return version, tokens


def train(config: dict[str, Any]) -> None:
    """Train in one worker on its own samples."""
    model = AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.float32)
    model = fully_shard(model.to(get_device()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    attached = deltachain.attach(model, optimizer, url=config["url"], when_busy="wait")
    rank = ray.train.get_context().get_world_rank()
    for step in range(1, config["steps"] + 1):
        prompt = [3 + rank, 3 + step]
        version, tokens = ray.get(config["replica"].sample.remote(prompt))
        inputs = torch.tensor([prompt + tokens], device=get_device())
        model(input_ids=inputs, labels=inputs).loss.backward()
        optimizer.step()  # publishes: training waits for the diff of this rank's shards alone
        optimizer.zero_grad()
        ray.train.report({"step": step})
        print(f"step {step} of rank {rank}: on tokens of version {version}")
    attached.detach()


def main() -> None:
    ray.init()
    replica = ray.remote(Replica).options(num_gpus=GPUS, resources={"engine": 1}).remote(MODEL)
    ray.get(replica.follow.remote(URL))
    config = {"model": MODEL, "url": URL, "steps": STEPS, "replica": replica}
    TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2, use_gpu=GPUS > 0, placement_strategy="SPREAD"),
        run_config=RunConfig(storage_path=tempfile.mkdtemp(), failure_config=FailureConfig(1)),
    ).fit()
    version, tokens = ray.get(replica.sample.remote([3, 4]))
    print(f"{len(tokens)} tokens of version {version}")


if __name__ == "__main__":
    main()
