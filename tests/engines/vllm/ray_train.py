"""Workers of Ray Train on two nodes that attach, and an ``LLM`` on the second one that follows.

``python -m`` this. What was seen of each step, a version and whether all bits are the trainer's in
the engine, is one line of JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.engines.vllm.ray_actor import follower  # isort: skip  # before others import vLLM

import ray
import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.nn.parallel import DistributedDataParallel

import deltachain
from tests.engines.trainer import Run, masters_of
from tests.engines.vllm.ray_cluster import clustered

STEPS = 20


def work(config: dict[str, Any]) -> None:
    """Train in one worker, and have the engine compared after each step."""
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
            saved = config["seen"].with_name("saved")
            inner.save_pretrained(saved, state_dict=state)
            same = ray.get(config["actor"].holds.remote(saved))
            seen.append([publisher.version, same])
    publisher.close()
    if rank == 0:
        config["seen"].write_text(json.dumps(seen))


def main() -> None:
    folder = Path(sys.argv[1])
    trained, url = Run(folder), (folder / "chain").as_uri()
    cluster = clustered({}, {"resources": {"engine": 1}})
    actor = follower(trained.base, url, num_cpus=0, resources={"engine": 1})
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
