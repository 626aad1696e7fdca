"""Workers of Ray Train on two nodes of Ray, and what follows them in actors: ``python -m`` this.

``fsdp2``: each worker publishes its shard by vLLM's interface, whose clients are an ``LLM`` and a
model of torch. ``ddp``: the workers attach, and a model of torch follows. What was seen of each
step, a version and whether all bits are the trainer's in each actor, is one line of JSON.
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
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from vllm import LLM
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import RayVLLMWeightSyncClient, WeightTransferTrainerFactory

import deltachain
import deltachain_vllm
from deltachain.subscribe import Subscriber
from deltachain_vllm import DeltaChainTrainerInit
from examples.demo.online.processes import free_port
from tests.engines.expected import sharded
from tests.engines.trainer import Run, masters_of
from tests.engines.vllm.server import digest

STEPS = 20
SMALL = 100 << 20  # bytes of an object store


class Replica(LLM):  # type: ignore[misc]
    def follow(self, url: str) -> None:
        self.subscriber = deltachain_vllm.subscribe(self, url)

    def update_weights(self, request: Any) -> None:
        self.subscriber.update(request.update_info["version"])

    def digests(self) -> dict[str, str]:
        (found,) = self.collective_rpc("compute_weight_checksums")
        return {name.partition(":pcp0:")[2]: text for name, text in found.items()}


class Model:
    """A model of torch, in the checkpoint's dtype."""

    def __init__(self, base: Path, url: str) -> None:
        self.model, self.url = masters_of(base).bfloat16(), url

    def init_weight_transfer_engine(self, request: Any) -> None: ...

    def update_weights(self, request: Any) -> None:
        self.update(request.update_info["version"])

    def update(self, version: int) -> None:
        if not hasattr(self, "subscriber"):
            self.subscriber = Subscriber(self.url, self.model)
        self.subscriber.update(version)

    def digests(self) -> dict[str, str]:
        return {name: digest(one) for name, one in self.model.state_dict().items()}


def full(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).bfloat16()
        for name, one in model.state_dict().items()
    }


def work(config: dict[str, Any]) -> None:
    """Train in one worker, and have the actors compared after each step."""
    torch.set_num_threads(1)
    model = inner = masters_of(config["base"])
    if config["kind"] == "ddp":
        model = DistributedDataParallel(inner)
    else:
        fully_shard(inner, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    actors, url, rank = config["actors"], config["url"], torch.distributed.get_rank()
    if config["kind"] == "ddp":
        publisher = deltachain.attach(model, optimizer, url=url, when_busy="wait").publisher
    else:
        engine = WeightTransferTrainerFactory.trainer_init(
            DeltaChainTrainerInit(url, {"dtype": "BF16"}),
            client=[RayVLLMWeightSyncClient(actor) for actor in actors],
            source=model,
        )
        publisher = engine.publisher
    seen = []
    for step in range(STEPS):
        torch.manual_seed(2 * step + rank)
        inputs = torch.randint(3, 500, (2, 32))
        model(input_ids=inputs, labels=inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if config["kind"] == "ddp":
            publisher.flush()
            if rank == 0:
                ray.get([actor.update.remote(publisher.version) for actor in actors])
        else:
            engine.send_weights()
        state = full(inner)
        if rank == 0:
            inner.save_pretrained(config["saved"], state_dict=state)
            wanted = [{name: digest(one) for name, one in state.items()}]
            wanted.append({n: digest(one) for n, one in sharded(config["saved"], 1).items()})
            held = ray.get([actor.digests.remote() for actor in actors])
            seen.append([publisher.version, [one in wanted for one in held]])
    publisher.close()
    if rank == 0:
        config["seen"].write_text(json.dumps(seen))


def node() -> dict[str, int]:
    """Return what a node has. It waits for agents whose ports are not given, but not for long."""
    agents = ("metrics_agent_port", "runtime_env_agent_port", "dashboard_agent_listen_port")
    return {"num_cpus": 2, "object_store_memory": SMALL, **{name: free_port() for name in agents}}


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    trained, url = Run(folder), (folder / "chain").as_uri()
    cluster = Cluster(initialize_head=True, head_node_args={**node(), "include_dashboard": False})
    second = cluster.add_node(**node())
    ray.init(address=cluster.address, log_to_driver=False)
    there = NodeAffinitySchedulingStrategy(second.node_id, soft=False)
    actors = [ray.remote(Model).options(num_cpus=0).remote(trained.base, url)]
    if kind == "fsdp2":
        place = ray.remote(Replica).options(num_cpus=1, scheduling_strategy=there)
        replica = place.remote(
            str(trained.base),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=256,
            weight_transfer_config=WeightTransferConfig(backend="deltachain"),
            worker_extension_cls="tests.engines.vllm.plain.WorkerExtension",
        )
        ray.get(replica.follow.remote(url))
        actors.append(replica)
    config = {"kind": kind, "url": url, "base": trained.base, "actors": actors}
    paths = {"saved": folder / "saved", "seen": folder / "seen"}
    TorchTrainer(
        work,
        train_loop_config={**config, **paths},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(storage_path=str(folder / "ray")),
    ).fit()
    ray.shutdown()
    cluster.shutdown()
    sys.stdout.write(f"{paths['seen'].read_text()}\n")


if __name__ == "__main__":
    main()
