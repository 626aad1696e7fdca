"""SkyRL's policy workers publish by its weight-sync backend ``delta``; its servers follow.

Needs ``pip install 'deltachain[torch]' skyrl vllm``, and a server, which follows the chain::

    DELTACHAIN_URL=s3://policies/run-1 VLLM_PLUGINS=deltachain,deltachain_http \
      VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-0.6B --served-model-name policy \
      --worker-extension-cls deltachain_vllm.WorkerExtension \
      --weight-transfer-config '{"backend": "deltachain"}' --enable-scale-out
    DELTACHAIN_URL=s3://policies/run-1 SERVER=127.0.0.1:8000 python examples/13_skyrl.py

``MODEL`` is the name on the Hub or the folder that the server serves, as ``SERVED``. A CPU runs
workers of SkyRL's own base, with its configuration, clients and source of weights. There it ends:
SkyRL's FSDP worker imports flash-attn, so ``Policy`` stands in for it. With cards, the task of
SkyRL's entry point begins instead with::

    from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker
    fsdp_worker.PolicyWorker = publishing(fsdp_worker.FSDPPolicyWorkerBase)

Prints a line a step, once the server holds its version.
"""

import asyncio
import os
from typing import Any

import ray
import torch
from skyrl.backends.skyrl_train.inference_servers.setup import build_new_inference_client
from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.utils.utils import get_free_port, validate_cfg
from torch import distributed
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from deltachain_vllm.skyrl import publishing

MODEL = os.environ.get("MODEL", "Qwen/Qwen3-0.6B")
URL = os.environ.get("DELTACHAIN_URL", "s3://policies/run-1")
SERVER = f"http://{os.environ.get('SERVER', '127.0.0.1:8000')}"
SERVED = os.environ.get("SERVED", "policy")
STEPS = int(os.environ.get("STEPS", "20"))
RANKS, TOKENS, RATE = 2, 16, 1e-5


class Policy(PolicyWorkerBase):
    """What SkyRL's FSDP worker is for cards."""

    async def start(self, path: str, client: Any, engines: Any) -> None:
        distributed.init_process_group("gloo")  # by variables that SkyRL has set
        self.inner = fully_shard(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
        rate = self.cfg.policy.optimizer_config.lr
        self.steps = torch.optim.AdamW(self.inner.parameters(), lr=rate)
        await self.init_weight_sync_state(client, engines)

    def _build_weight_source(self, dtype: torch.dtype, backend: str) -> FsdpWeightSource:
        assert backend == "delta"
        return FsdpWeightSource(self.inner, dtype)

    async def step(self, tokens: list[int], engines: Any) -> None:
        inputs = torch.tensor([tokens])
        self.inner(input_ids=inputs, labels=inputs).loss.backward()
        self.steps.step()
        self.steps.zero_grad()
        await self._sync_weights_to_inference_engines(self._weight_sync_inference_client, engines)


def configured() -> SkyRLTrainConfig:
    """Make the configuration, as of SkyRL's command line."""
    inference = {
        "external_proxy_url": SERVER,
        "served_model_name": SERVED,
        "weight_sync_backend": "delta",
        "delta_weight_sync.sync_dir": URL,
    }
    given = {f"generator.inference_engine.{name}": value for name, value in inference.items()}
    given |= {"trainer.placement.colocate_all": False, "trainer.policy.model.path": MODEL}
    given |= {"trainer.policy.optimizer_config.lr": RATE}
    given |= {"trainer.logger": "console", "trainer.algorithm.temperature": 1.0}
    config = SkyRLTrainConfig.from_cli_overrides(given)
    validate_cfg(config)
    return config


async def main() -> None:
    config = configured()
    engines = config.generator.inference_engine
    client, _ = build_new_inference_client(config, None)
    ray.init(num_gpus=RANKS)  # by name: publishing asks for a card each
    worker = publishing(Policy)
    place = {"master_addr": "127.0.0.1", "master_port": get_free_port(), "world_size": RANKS}
    made = {"cfg": config.trainer, "local_rank": 0, "sequence_parallel_size": 1, **place}
    ranks = [worker.remote(rank=rank, **made) for rank in range(RANKS)]
    ray.get([rank.start.remote(MODEL, client, engines) for rank in ranks])
    for step in range(1, STEPS + 1):
        prompts = [[5 + rank, 5 + step] for rank in range(RANKS)]
        how = {"max_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}
        asked = {"prompt_token_ids": prompts, "sampling_params": how}
        answers = (await client.generate(asked))["response_ids"]
        triples = zip(ranks, prompts, answers, strict=True)
        ray.get([rank.step.remote(prompt + answer, engines) for rank, prompt, answer in triples])
        print(f"step {step}: trained on answers of {len(answers[0])} tokens; the server holds it")
    await client.teardown()
    ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
