"""What ranks do under megatron-core; ``make venv-trainers`` has it."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe import moe_utils
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import Qwen3Config, Qwen3MoeConfig

import deltachain
from deltachain.integrations.megatron import shards
from tests.ranks.megatron_bridges import LocalQwen3, LocalQwen3Moe
from tests.ranks.transformers_trials import TINY
from tests.ranks.trials import RATE, attaches, publishes


class OnHost(TorchFunctionMode):
    """The host in the place of a card: megatron-core asks for one by name."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        found = func(*args, **kwargs)
        is_kind = func is Tensor.type and isinstance(found, str)
        return found.replace("torch.", "torch.cuda.") if is_kind else found


def on_host() -> OnHost:
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.mem_get_info = lambda *_: (0, 0)
    moe_utils.te_general_gemm = None  # unknown without Transformer Engine, and asked for
    tensor_parallel.get_cuda_rng_tracker().fork = nullcontext  # of dropout, which is 0
    return OnHost()


def stepping(models: list[Any], optimizer: Any) -> Callable[[int], None]:
    """Return a function that trains a step, by its number."""

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

    return step


def megatron(rank: int, parallel: str, url: str, folder: str) -> None:
    """Train by megatron-core with the distributed optimizer: ``TP2 PP2`` or ``EP2``."""
    with on_host():
        _megatron(rank, parallel, url, folder)


def _megatron(rank: int, parallel: str, url: str, folder: str) -> None:
    torch.manual_seed(rank)
    degrees = {one[:2]: int(one[2:]) for one in parallel.split("-")}
    parallel_state.initialize_model_parallel(
        degrees.get("TP", 1),
        degrees.get("PP", 1),
        expert_model_parallel_size=degrees.get("EP", 1),
    )
    sizes = TINY | {"vocab_size": 61, "head_dim": 8, "num_hidden_layers": 4}
    experts: dict[str, Any] = {
        "moe_intermediate_size": TINY["intermediate_size"] // 3,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
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

    def export() -> dict[str, Tensor]:
        return {name: one.detach().clone() for name, one in bridge.export_weights(models)}

    mine, step = shards(bridge, models), stepping(models, optimizer)
    publishes(rank, mine, step, export, url, folder)
    attaches(rank, partial(deltachain.attach, mine, optimizer), step, export, url, folder)
