"""Engines in Ray actors: an ``LLM``, which is told versions, and an ``AsyncLLM``, which follows.

``python -m`` this module has a trainer drive either by vLLM's client. What it saw of each step,
version and whether all bits are the trainer's, is one line of JSON.
"""

import asyncio
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "deltachain",
}

import ray
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import (
    ModuleSource,
    RayVLLMWeightSyncClient,
    WeightTransferTrainerFactory,
)

import deltachain_vllm
from deltachain_vllm import DeltaChainTrainerInit
from tests.engines.expected import sharded
from tests.engines.ray_cluster import clustered
from tests.engines.trainer import Run
from tests.engines.vllm.server import digest

STEPS = 20
EXAMPLE: Any = importlib.import_module("examples.12_ray")
SETTINGS: dict[str, Any] = {
    **EXAMPLE.Replica.settings,
    "enforce_eager": True,
    "worker_extension_cls": "tests.engines.vllm.plain.WorkerExtension",
}


def same(found: list[dict[str, str]], checkpoint: Path) -> bool:
    (checksums,) = found
    held = {name.partition(":pcp0:")[2]: text for name, text in checksums.items()}
    return held == {name: digest(bits) for name, bits in sharded(checkpoint, 1).items()}


class Replica(LLM):  # type: ignore[misc]
    def __init__(self, base: str, **options: Any) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        own = {"weight_transfer_config": WeightTransferConfig(backend="deltachain")}
        super().__init__(base, **(SETTINGS | own | options))

    def follow(self, url: str) -> None:
        self.subscriber = deltachain_vllm.subscribe(self, url)

    def update_weights(self, request: Any) -> None:
        self.subscriber.update(request.update_info["version"])

    def sample(self, prompt: list[int]) -> tuple[str, list[int]]:
        how = SamplingParams(max_tokens=16, ignore_eos=True)
        (found,) = self.generate([{"prompt_token_ids": prompt}], how, use_tqdm=False)
        return self.get_weight_version(), list(found.outputs[0].token_ids)

    def seen(self, version: int, checkpoint: Path) -> tuple[str, bool]:
        self.subscriber.update(version)
        return self.get_weight_version(), self.holds(checkpoint)

    def holds(self, checkpoint: Path) -> bool:
        return same(self.collective_rpc("compute_weight_checksums"), checkpoint)


class Follower(EXAMPLE.Replica):  # type: ignore[misc]
    """An ``AsyncLLM`` that follows, whether it is told of versions or not."""

    settings = SETTINGS

    async def init_weight_transfer_engine(self, request: Any) -> None: ...

    async def update_weights(self, request: Any) -> None:
        await asyncio.to_thread(self.leader.update, request.update_info["version"])

    async def seen(self, version: int, checkpoint: Path) -> tuple[str, bool]:
        while (await self.engine.get_weight_version()) != str(version):
            assert not self.leader.ended, self.leader.ended
            await asyncio.sleep(0.05)
        found = await self.engine.collective_rpc("compute_weight_checksums")
        return await self.engine.get_weight_version(), same(found, checkpoint)


def main() -> None:
    folder, kind = Path(sys.argv[1]), {"LLM": Replica, "AsyncLLM": Follower}[sys.argv[2]]
    trained, url = Run(folder), (folder / "chain").as_uri()
    cluster = clustered({})
    replica = ray.remote(kind).remote(str(trained.base))
    ray.get(replica.follow.remote(url))
    engine = WeightTransferTrainerFactory.trainer_init(
        DeltaChainTrainerInit(url, {"dtype": "BF16"}),
        client=RayVLLMWeightSyncClient(replica),
        source=ModuleSource(trained.model),
    )
    seen = []
    for step in range(1, STEPS + 1):
        trained.step()
        engine.send_weights()
        seen.append(ray.get(replica.seen.remote(step, trained.saved())))
    engine.shutdown()
    ray.shutdown()
    cluster.shutdown()
    sys.stdout.write(f"{json.dumps(seen)}\n")


if __name__ == "__main__":
    main()
