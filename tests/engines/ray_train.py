"""The example of Ray, whose engine is compared after each step.

``python -m`` this, with a folder, ``ddp`` or ``fsdp2``, and the actor as ``MODULE:CLASS``. What was
seen of each step, the engine's version and whether all its bits are the trainer's, is one line of
JSON.
"""

import importlib
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import deltachain
from tests.engines.ray_cluster import clustered
from tests.engines.trainer import Run, save

EXAMPLE: Any = importlib.import_module("examples.12_ray")
TRAIN = EXAMPLE.train


def work(config: dict[str, Any]) -> None:
    """Train in one worker, and have the engine compared after each step."""
    torch.set_num_threads(1)
    attach, folder, seen = deltachain.attach, config["folder"], list[Any]()

    def attached(model: Any, optimizer: Any, **settings: Any) -> Any:
        made = attach(model, optimizer, **settings)
        publisher, publishing = made.publisher, optimizer.step

        def step() -> None:
            with CommDebugMode() as talk:
                publishing()
                publisher.flush()
            assert not talk.get_total_counts(), talk.comm_counts  # nothing is gathered
            save(getattr(model, "module", model), folder / "saved")
            if torch.distributed.get_rank() == 0:
                version = publisher.version
                seen.append(ray.get(config["replica"].seen.remote(version, folder / "saved")))
                assert seen[-1][0] == str(version)

        optimizer.step = step
        return made

    package: Any = deltachain
    package.attach = attached
    if config["kind"] == "ddp":
        EXAMPLE.fully_shard = DistributedDataParallel
    TRAIN(config)
    if torch.distributed.get_rank() == 0:
        (folder / "seen").write_text(json.dumps(seen))


def main() -> None:
    folder, kind, actor = Path(sys.argv[1]), *sys.argv[2:]
    cluster = clustered({}, {"resources": {"engine": 1}})
    trainer = EXAMPLE.TorchTrainer

    def made(_: Any, train_loop_config: dict[str, Any], **given: Any) -> Any:
        given["scaling_config"].placement_strategy = "STRICT_SPREAD"
        more = {"folder": folder, "kind": kind}
        return trainer(work, train_loop_config=train_loop_config | more, **given)

    EXAMPLE.TorchTrainer, EXAMPLE.Replica = made, pkgutil.resolve_name(actor)
    EXAMPLE.MODEL, EXAMPLE.URL = str(Run(folder).base), (folder / "chain").as_uri()
    EXAMPLE.ray.init = lambda: None  # it is
    EXAMPLE.main()
    ray.shutdown()
    cluster.shutdown()
    sys.stdout.write(f"{(folder / 'seen').read_text()}\n")


if __name__ == "__main__":
    main()
