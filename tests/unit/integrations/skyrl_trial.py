"""Runs in SkyRL's environment, by path: its policy workers, configuration and clients, on a CPU.

SkyRL's FSDP worker cannot be imported without flash-attn, which needs a card. So a worker here is
what that one inherits from, over the same source. Prints a line a step, and waits for one.
"""

import asyncio
import sys
from typing import Any

from tests.unit.integrations.lockstep import tell  # isort: skip  # before others log

import ray
import torch
from skyrl.backends.skyrl_train.inference_servers.setup import build_new_inference_client
from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.utils.utils import validate_cfg
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from deltachain.errors import ConfigError
from deltachain_vllm.skyrl import publishing
from examples.demo.online.processes import free_port
from tests.engines.ray_cluster import clustered
from tests.engines.trainer import save

STEPS, RANKS, RATE = 20, 2, 1e-3


class Policy(PolicyWorkerBase):
    async def start(self, path: str, client: Any, engines: Any) -> str:
        torch.set_num_threads(1)
        distributed.init_process_group("gloo")  # by the variables that SkyRL has set
        self.inner = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        fully_shard(self.inner, mesh=init_device_mesh("cpu", (RANKS,)))
        self.steps = torch.optim.AdamW(self.inner.parameters(), lr=RATE)
        await self.init_weight_sync_state(client, engines)
        sender = self._weight_sync_engine
        assert type(sender).__name__ == "DeltaChainSender"
        sender.skyrl_draft_source = sender.source
        try:
            sender.send_weights()
        except ConfigError as error:
            sender.skyrl_draft_source = None
            return str(error.args[0])
        return "a draft model was left behind"

    def _build_weight_source(self, dtype: torch.dtype, backend: str) -> Any:
        assert backend == "delta"
        return FsdpWeightSource(self.inner, dtype)

    async def step(self, seed: int, engines: Any) -> None:
        torch.manual_seed(seed)
        inputs = torch.randint(3, 500, (2, 32))
        self.inner(input_ids=inputs, labels=inputs).loss.backward()
        self.steps.step()
        self.steps.zero_grad()
        await self._sync_weights_to_inference_engines(self._weight_sync_inference_client, engines)

    def save(self, folder: str) -> None:
        save(self.inner, folder)


async def main() -> None:
    path, url, address = sys.argv[1:]
    server = f"http://{address}"
    given = {
        "run_engines_locally": False,
        "external_proxy_url": server,
        "external_server_urls": [server],
        "served_model_name": "tiny",
        "weight_sync_backend": "delta",
        "delta_weight_sync.sync_dir": url,
    }
    chosen = {f"generator.inference_engine.{name}": value for name, value in given.items()}
    chosen |= {"trainer.placement.colocate_all": False, "trainer.policy.model.path": path}
    config = SkyRLTrainConfig.from_cli_overrides(
        {**chosen, "trainer.logger": "console", "trainer.algorithm.temperature": 1.0}
    )
    validate_cfg(config)
    engines = config.generator.inference_engine
    client, _ = build_new_inference_client(config, None)
    place = {"master_addr": "127.0.0.1", "master_port": free_port(), "world_size": RANKS}
    made = {"cfg": config.trainer, "local_rank": 0, "sequence_parallel_size": 1, **place}
    cluster = clustered({"num_gpus": RANKS})  # by name
    worker = publishing(Policy)
    ranks = [worker.remote(rank=rank, **made) for rank in range(RANKS)]

    def each(method: str, *arguments: Any) -> list[Any]:
        found: list[Any] = ray.get([getattr(rank, method).remote(*arguments) for rank in ranks])
        return found

    refused = each("start", path, client, engines)
    assert refused == ["the chain has no weights of the draft model"] * RANKS, refused
    for step in range(1, STEPS + 1):
        each("step", step, engines)
        each("save", f"{path}-{step}")
        asked = {
            "prompt_token_ids": [[5, 6, 7]],
            "sampling_params": {"max_tokens": 4, "ignore_eos": True},
        }
        tell(len((await client.generate(asked))["response_ids"][0]))
    await client.teardown()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
