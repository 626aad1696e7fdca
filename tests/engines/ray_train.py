"""Workers of Ray Train on two nodes that attach, and an engine on the second one that follows.

``python -m`` this, with a folder, ``ddp`` or ``fsdp2``, and the actor as ``MODULE:CLASS``. What was
seen of each step, the engine's version and whether all its bits are the trainer's, is one line of
JSON.
"""

import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import deltachain
from tests.engines.ray_cluster import clustered
from tests.engines.trainer import Run, masters_of, save

STEPS = 20


def work(config: dict[str, Any]) -> None:
    """Train in one worker, and have the engine compared after each step."""
    torch.set_num_threads(1)
    inner = masters_of(config["base"])
    if config["kind"] == "fsdp2":
        model: Any = fully_shard(inner, mesh=init_device_mesh("cpu", (2,)))
    else:
        model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    url, rank, seen = config["url"], torch.distributed.get_rank(), []
    publisher = deltachain.attach(model, optimizer, url=url, when_busy="wait").publisher
    for step in range(STEPS):
        torch.manual_seed(2 * step + rank)
        inputs = torch.randint(3, 500, (2, 32))
        model(input_ids=inputs, labels=inputs).loss.backward()
        with CommDebugMode() as talk:
            optimizer.step()
            publisher.flush()
        assert not talk.get_total_counts(), talk.comm_counts  # nothing is gathered
        optimizer.zero_grad()
        save(inner, config["saved"])
        if rank == 0:
            actor, version = config["actor"], publisher.version
            seen.append(ray.get(actor.seen.remote(version, config["saved"])))
            assert seen[-1][0] == str(version)
    publisher.close()
    if rank == 0:
        config["seen"].write_text(json.dumps(seen))


def main() -> None:
    folder, kind, actor = Path(sys.argv[1]), *sys.argv[2:]
    base, url, seen = Run(folder).base, (folder / "chain").as_uri(), folder / "seen"
    cluster = clustered({}, {"resources": {"engine": 1}})
    made = ray.remote(pkgutil.resolve_name(actor)).options(num_cpus=0, resources={"engine": 1})
    replica = made.remote(str(base))
    ray.get(replica.follow.remote(url))
    given = {"url": url, "base": base, "kind": kind, "saved": folder / "saved", "seen": seen}
    TorchTrainer(
        work,
        train_loop_config={**given, "actor": replica},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(storage_path=str(folder / "ray")),
    ).fit()
    ray.shutdown()
    cluster.shutdown()
    sys.stdout.write(f"{seen.read_text()}\n")


if __name__ == "__main__":
    main()
