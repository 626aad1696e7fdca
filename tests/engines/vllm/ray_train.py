"""Workers of Ray Train on two nodes that attach, and a model of torch in an actor that follows.

``python -m`` this. What was seen of each step, a version and whether all bits are the trainer's in
the actor, is one line of JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import ray
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.nn.parallel import DistributedDataParallel

import deltachain
from deltachain.subscribe import Subscriber
from examples.demo.online.processes import free_port
from tests.engines.trainer import Run, masters_of
from tests.engines.vllm.server import digest

STEPS = 20
SMALL = 100 << 20  # bytes of an object store


class Model:
    """A model of torch, in the checkpoint's dtype."""

    def __init__(self, base: Path, url: str) -> None:
        self.model, self.url = masters_of(base).bfloat16(), url

    def update(self, version: int) -> None:
        if not hasattr(self, "subscriber"):
            self.subscriber = Subscriber(self.url, self.model)
        self.subscriber.update(version)

    def digests(self) -> dict[str, str]:
        return {name: digest(one) for name, one in self.model.state_dict().items()}


def work(config: dict[str, Any]) -> None:
    """Train in one worker, and have the actor compared after each step."""
    torch.set_num_threads(1)
    inner = masters_of(config["base"])
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    url, rank = config["url"], torch.distributed.get_rank()
    publisher = deltachain.attach(model, optimizer, url=url, when_busy="wait").publisher
    seen = []
    for step in range(STEPS):
        torch.manual_seed(2 * step + rank)
        inputs = torch.randint(3, 500, (2, 32))
        model(input_ids=inputs, labels=inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        publisher.flush()
        if rank == 0:
            ray.get(config["actor"].update.remote(publisher.version))
            state = {name: one.bfloat16() for name, one in inner.state_dict().items()}
            wanted = {name: digest(one) for name, one in state.items()}
            held = ray.get(config["actor"].digests.remote())
            seen.append([publisher.version, held == wanted])
    publisher.close()
    if rank == 0:
        config["seen"].write_text(json.dumps(seen))


def node() -> dict[str, int]:
    """Return what a node has. It waits for agents whose ports are not given, but not for long."""
    agents = ("metrics_agent_port", "runtime_env_agent_port", "dashboard_agent_listen_port")
    return {"num_cpus": 2, "object_store_memory": SMALL, **{name: free_port() for name in agents}}


def main() -> None:
    folder = Path(sys.argv[1])
    trained, url = Run(folder), (folder / "chain").as_uri()
    cluster = Cluster(initialize_head=True, head_node_args={**node(), "include_dashboard": False})
    cluster.add_node(**node())
    ray.init(address=cluster.address, log_to_driver=False)
    actor = ray.remote(Model).options(num_cpus=0).remote(trained.base, url)
    seen = folder / "seen"
    TorchTrainer(
        work,
        train_loop_config={"url": url, "base": trained.base, "actor": actor, "seen": seen},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(storage_path=str(folder / "ray")),
    ).fit()
    ray.shutdown()
    cluster.shutdown()
    sys.stdout.write(f"{seen.read_text()}\n")


if __name__ == "__main__":
    main()
