"""``python -m tests.ranks.framework_trials TRIAL RANKS URL FOLDER``: trainers of other frameworks.

Run by the Python of ``.venv-trainers``, which has DeepSpeed and megatron-core. Every version is
compared, bit for bit, with a full export by the framework itself.
"""

import os
import sys
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor.debug import CommDebugMode

from deltachain.publish import PublishConfig, Publisher
from tests.ranks.spawn import run
from tests.ranks.trials import RATE, VOCAB, Model, check_bits

STEPS = 10


def zero(rank: int, stage: str, url: str, folder: str) -> None:
    """Train under DeepSpeed's ZeRO of a stage: 1, 2, 3, or 3 with small parameters whole."""
    import faulthandler; faulthandler.dump_traceback_later(100)
    import deepspeed

    # Messages by gloo: its own operators for a host are compiled for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    ranks = distributed.get_world_size()
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    os.environ.update({name: str(number) for name, number in where.items()})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": int(stage[0]),
            "stage3_param_persistence_threshold": 50 if stage.endswith("p") else 0,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=Model(), config=config)

    def export() -> dict[str, Tensor]:
        parameters = dict(engine.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            whole = {name: one.detach().clone() for name, one in parameters.items()}
        return whole | dict(engine.module.named_buffers())

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(10 * number + rank)
        tokens = torch.randint(0, VOCAB, (2, 9), generator=generator)
        logits = engine(tokens[:, :-1])
        engine.backward(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        )
        engine.step()

    with CommDebugMode() as talk:
        publisher = Publisher(PublishConfig(url=url, when_busy="wait", deadline_s=60)).attach(engine)
    assert talk.get_total_counts() == 0
    with publisher:
        check_bits(rank, 0, export(), url, folder)
        for number in range(1, 1 + STEPS):
            step(number)
            with CommDebugMode() as talk:
                receipt = publisher.publish(step=number).result(60)
            assert talk.get_total_counts() == 0
            assert receipt.version == number
            assert receipt.nnz
            check_bits(rank, number, export(), url, folder)


if __name__ == "__main__":
    name, count, *arguments = sys.argv[1:]
    run(f"tests.ranks.framework_trials:{name}", int(count), *arguments)
