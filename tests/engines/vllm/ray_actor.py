"""An ``LLM`` in a Ray actor that a trainer drives by vLLM's client: ``python -m`` this module.

What it saw of each step, version and whether all bits are the trainer's, is one line of JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "deltachain",
}

import ray
from vllm import LLM
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import (
    ModuleSource,
    RayVLLMWeightSyncClient,
    WeightTransferTrainerFactory,
)

import deltachain_vllm
from deltachain_vllm import DeltaChainTrainerInit
from tests.engines.expected import sharded
from tests.engines.trainer import Run
from tests.engines.vllm.server import digest

STEPS = 20


class Replica(LLM):  # type: ignore[misc]
    def follow(self, url: str) -> None:
        self.subscriber = deltachain_vllm.subscribe(self, url)

    def update_weights(self, request: Any) -> None:
        self.update(request.update_info["version"])

    def update(self, version: int) -> None:
        self.subscriber.update(version)

    def holds(self, checkpoint: Path) -> bool:
        (found,) = self.collective_rpc("compute_weight_checksums")
        held = {name.partition(":pcp0:")[2]: text for name, text in found.items()}
        return held == {name: digest(bits) for name, bits in sharded(checkpoint, 1).items()}


def follower(base: Path, url: str, **where: Any) -> Any:
    actor = (
        ray.remote(Replica)
        .options(**where)
        .remote(
            str(base),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=256,
            weight_transfer_config=WeightTransferConfig(backend="deltachain"),
            worker_extension_cls="tests.engines.vllm.plain.WorkerExtension",
        )
    )
    ray.get(actor.follow.remote(url))
    return actor


def main() -> None:
    folder = Path(sys.argv[1])
    trained, url = Run(folder), (folder / "chain").as_uri()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    replica = follower(trained.base, url)
    engine = WeightTransferTrainerFactory.trainer_init(
        DeltaChainTrainerInit(url, {"dtype": "BF16"}),
        client=RayVLLMWeightSyncClient(replica),
        source=ModuleSource(trained.model),
    )
    seen = []
    for _ in range(STEPS):
        trained.step()
        engine.send_weights()
        same = ray.get(replica.holds.remote(trained.saved()))
        seen.append([ray.get(replica.get_weight_version.remote()), same])
    engine.shutdown()
    ray.shutdown()
    sys.stdout.write(f"{json.dumps(seen)}\n")


if __name__ == "__main__":
    main()
