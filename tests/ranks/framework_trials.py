"""``python -m tests.ranks.framework_trials TRIAL RANKS URL FOLDER``: trainers of other frameworks.

Run by the Python of ``.venv-trainers``, which has DeepSpeed and megatron-core. Every version is
compared, bit for bit, with a full export by the framework itself.
"""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor.debug import CommDebugMode
from torch.overrides import TorchFunctionMode

from deltachain.publish import PublishConfig, Publisher
from tests.ranks.spawn import run
from tests.ranks.transformers_trials import TINY
from tests.ranks.trials import RATE, VOCAB, Model, check_bits

STEPS = 10


def zero(rank: int, stage: str, url: str, folder: str) -> None:
    """Train under DeepSpeed's ZeRO of a stage: 1, 2, 3, or 3 with small parameters whole."""
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

    publishes(rank, engine, step, export, url, folder)


def publishes(
    rank: int,
    model: Any,
    step: Callable[[int], None],
    export: Callable[[], dict[str, Tensor]],
    url: str,
    folder: str,
) -> None:
    """Publish ten steps, without a collective, and compare each with the framework's export."""
    with CommDebugMode() as talk:
        publisher = Publisher(PublishConfig(url=url, when_busy="wait", deadline_s=60)).attach(model)
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


class OnHost(TorchFunctionMode):
    """The host in the place of a card: megatron-core makes its tensors on one, whatever there is."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        found = func(*args, **kwargs)
        is_kind = func is Tensor.type and isinstance(found, str)
        return found.replace("torch.", "torch.cuda.") if is_kind else found


def megatron(rank: int, parallel: str, url: str, folder: str) -> None:
    """Train by megatron-core with the distributed optimizer: ``TP2 PP2`` or ``EP2``."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    with OnHost():
        _megatron(rank, parallel, url, folder)


def _megatron(rank: int, parallel: str, url: str, folder: str) -> None:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe import moe_utils
    from transformers import Qwen3Config, Qwen3MoeConfig

    from deltachain.integrations.megatron import shards
    from tests.ranks.megatron_bridges import LocalQwen3, LocalQwen3Moe

    moe_utils.te_general_gemm = None  # unknown without Transformer Engine, and asked for
    tensor_parallel.get_cuda_rng_tracker().fork = nullcontext  # of dropout, which is 0
    torch.manual_seed(rank)
    degrees = {one[:2]: int(one[2:]) for one in parallel.split("-")}
    parallel_state.initialize_model_parallel(
        degrees.get("TP", 1),
        degrees.get("PP", 1),
        expert_model_parallel_size=degrees.get("EP", 1),
    )
    sizes = TINY | {"vocab_size": 61, "head_dim": 8, "num_hidden_layers": 4}
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    if "EP" in degrees:
        bridge: Any = LocalQwen3Moe(
            Qwen3MoeConfig(**sizes, **experts), make_vocab_size_divisible_by=16
        )
    else:
        bridge = LocalQwen3(Qwen3Config(**sizes), make_vocab_size_divisible_by=16)
    models = bridge.get_model(
        wrap_with_ddp=True, ddp_config={"use_distributed_optimizer": True}, model_type=None
    )
    bridge.config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=RATE, bf16=True, use_distributed_optimizer=True), models
    )

    def forward(batches: Any, model: Any) -> Any:
        tokens = next(batches)
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        losses = model(tokens, places, mask[None, None], labels=tokens)
        return losses, lambda output: (output.float().mean(), {})

    def step(number: int) -> None:
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        replica = parallel_state.get_data_parallel_rank()
        generator = torch.Generator().manual_seed(10 * number + replica)
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(torch.randint(0, 61, (1, 2, 8), generator=generator)),
            model=models,
            num_microbatches=1,
            seq_length=8,
            micro_batch_size=2,
        )
        optimizer.step()

    def export() -> dict[str, Tensor]:
        return {name: one.detach().clone() for name, one in bridge.export_weights(models)}

    publishes(rank, shards(bridge, models), step, export, url, folder)


if __name__ == "__main__":
    name, count, *arguments = sys.argv[1:]
    run(f"tests.ranks.framework_trials:{name}", int(count), *arguments)
