"""What a CPU worker of stock vLLM makes of a checkpoint, without an engine around it.

This is the oracle of everything that writes to a live model: a checkpoint that is loaded afresh is
right by definition, so a live model that was brought to the same weights must equal it bit by bit,
in every tensor that the model has, and not in its parameters alone.

One process is one rank, and stays that rank of that many: process groups are made once and kept.
"""

# ruff: noqa: PLC0415 - vLLM is imported when it is used: collecting tests must not need it
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor, distributed, nn
from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]

from deltachain.replica.engine import EngineModel
from tests.engines.two_ranks import RENDEZVOUS


def packs_linears() -> bool:
    """Whether linear layers are packed: oneDNN has no such kernel of bf16 below AVX-512."""
    from vllm.model_executor.layers import utils

    layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return not layer.weight.numel()


def has_fp8_cache() -> bool:
    """Whether keys and values can be kept in fp8: the condition of vLLM's backend for CPUs."""
    return torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()


def multiplies_codes_exactly() -> bool:
    """Whether int8 products are exact sums: without VNNI, oneDNN's saturate at 16 bits."""
    from vllm import _custom_ops

    weight, scales = torch.full((64, 64), 127, dtype=torch.int8), torch.ones(64, 1)
    packed = _custom_ops.create_onednn_scaled_mm(weight.t(), scales, torch.float32, True, False)
    codes, found = torch.full((1, 64), 127, dtype=torch.int8), torch.empty(1, 64)
    _custom_ops.onednn_scaled_mm(packed, codes, found, torch.ones(1, 1), None, None, None)
    return bool((found == 64 * 127 * 127).all())


@contextmanager
def packed_linears() -> Iterator[None]:
    """Pack linear layers as they are where :func:`packs_linears`; elsewhere into copies.

    Of a packed layer nobody can read a weight, whichever kernel has it.
    """
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm

    def pack(layer: Any, remove_weight: bool) -> None:
        dispatch(layer, remove_weight)
        if layer.weight.ndim != 2 or not layer.weight.numel():
            return
        held = layer.weight.detach().clone()
        layer.cpu_linear = lambda x, _, bias: nn.functional.linear(x, held, bias)
        if remove_weight:
            layer.weight = nn.Parameter(held.new_empty(0), requires_grad=False)

    with patch.object(utils, "dispatch_cpu_unquantized_gemm", pack):
        yield


_ENVIRONMENT: Final[Mapping[str, str]] = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_STOCK: Final[Mapping[str, str]] = {"VLLM_PLUGINS": ""}


def load_fresh(checkpoint: Path, **how: Any) -> nn.Module:
    with load_in_context(checkpoint, **how) as (_, model):
        return model


@contextmanager
def load_in_context(
    checkpoint: Path,
    *,
    tp: int = 1,
    rank: int = 0,
    plain_linears: bool = True,
    plain_experts: bool = False,
    redundant: int | None = None,
    **arguments: Any,
) -> Iterator[tuple[Any, nn.Module]]:
    """As :func:`load_fresh`, staying where vLLM's loaders can be called again.

    With a number of redundant experts, made to balance them, which vLLM refuses on a CPU.
    """
    with ExitStack() as stack:
        stack.enter_context(_environment())
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs

        stack.enter_context(_shortcuts())
        if plain_linears:
            stack.enter_context(unpacked())
        if plain_experts:
            stack.enter_context(unpacked_experts())
        config = EngineArgs(
            model=str(checkpoint),
            dtype="bfloat16",
            max_model_len=128,
            enforce_eager=True,
            skip_tokenizer_init=True,
            use_tqdm_on_load=False,
            tensor_parallel_size=tp,
            **arguments,
        ).create_engine_config()
        _join(config.parallel_config, rank)
        if redundant is not None:
            parallel = config.parallel_config
            parallel.enable_eplb = parallel.enable_expert_parallel = True
            parallel.eplb_config.num_redundant_experts = redundant
            parallel.eplb_config.use_async = False
            parallel.eplb_config.communicator = "torch_nccl"  # on a CPU: gloo
        stack.enter_context(set_current_vllm_config(config))
        model = _load(config)
        yield config, _with_draft(config, model) if config.speculative_config else model


@contextmanager
def unpacked() -> Iterator[None]:
    """Leave the weights of linear layers where they are, as an accelerator does.

    Stock vLLM on a CPU packs them into handles of its kernels when they have been loaded, and keeps
    parameters of no elements: nothing could be written to those in place. Layers that are loaded in
    here multiply by their parameter, for as long as they live. Convolutions are packed all the
    same: they have no plain kernel.
    """
    from vllm.model_executor.layers import utils

    packing: Callable[[Any, bool], None] = utils.dispatch_cpu_unquantized_gemm

    def plain(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = nn.functional.linear
        else:
            packing(layer, remove_weight)

    with patch.object(utils, "dispatch_cpu_unquantized_gemm", plain):
        yield


@contextmanager
def unpacked_experts() -> Iterator[None]:
    """Leave the weights of experts in the order in which they were loaded, as kernels of GPUs do.

    Neither loading nor any reload makes a kernel of them: such experts cannot be computed. Whatever
    else is processed after loading, such as latent attention and convolutions, is.
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method

    def keep(method: Any, layer: Any, w13: Tensor, w2: Tensor) -> None:
        del method, layer, w13, w2

    made = unquantized_fused_moe_method.UnquantizedFusedMoEMethod
    with patch.object(made, "_setup_kernel", keep):
        yield


@contextmanager
def sharded_experts(*, packed: bool = True) -> Iterator[None]:
    """Let kernels of experts obey the map of expert parallelism, as those of GPUs do.

    vLLM's own for CPUs looks for global numbers among the experts of its rank, past their end, and
    the worker dies. Unless they are ``packed``, experts are multiplied as they were loaded.
    """
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    experts = cpu_moe.CPUUnquantizedExperts
    kernel = experts.apply if packed else _multiply

    def local(self: Any, *given: Any, expert_map: Tensor | None, **more: Any) -> None:
        if expert_map is not None:
            ids = expert_map[more["topk_ids"].long()].to(more["topk_ids"].dtype)
            more["topk_weights"] = more["topk_weights"] * (ids >= 0)
            more["topk_ids"] = ids.clamp(min=0)
        kernel(self, *given, expert_map=None, **more)

    with ExitStack() as stack:
        stack.enter_context(patch.object(experts, "apply", local))
        if not packed:
            skip = patch.object(experts, "process_weights_after_loading", lambda *_: None)
            stack.enter_context(skip)
        yield


def _multiply(_: Any, output: Tensor, hidden_states: Tensor, **given: Any) -> None:
    output.zero_()
    for number, (w13, w2) in enumerate(zip(given["w1"], given["w2"], strict=True)):
        gate, up = nn.functional.linear(hidden_states, w13).chunk(2, -1)
        found = nn.functional.linear(nn.functional.silu(gate) * up, w2)
        weights = given["topk_weights"] * (given["topk_ids"] == number)
        output += (found * weights.sum(-1, keepdim=True)).to(output.dtype)


def known(config: Any, model: nn.Module, balancer: Any = None) -> EngineModel:
    from deltachain_vllm.model import VllmModel

    model, draft = model.values() if isinstance(model, nn.ModuleDict) else (model, None)
    return VllmModel(model, config, draft, balancer)


def _with_draft(config: Any, model: nn.Module) -> nn.Module:
    """Return a model and the draft that vLLM's workers make and share layers with."""
    from vllm.v1.spec_decode.eagle import EagleProposer

    drafter = object.__new__(EagleProposer)  # it would make buffers of tokens first
    drafter.vllm_config, drafter.speculative_config = config, config.speculative_config
    drafter.supports_mm_inputs = drafter.parallel_drafting = False
    drafter.use_local_argmax_reduction = False
    drafter.load_model(model)
    return nn.ModuleDict({"model": model, "draft": drafter.model})


Move: TypeAlias = Callable[[list[list[int]]], None]
"""Has all ranks move experts: takes the experts in the slots of every layer."""


@contextmanager
def load_moving(
    checkpoint: Path, *, rank: int, ranks: int, redundant: int
) -> Iterator[tuple[EngineModel, nn.Module, Move]]:
    """Load redundant experts, which vLLM itself moves."""
    with load_in_context(
        checkpoint, tp=ranks, rank=rank, redundant=redundant, plain_experts=True
    ) as (config, model):
        from vllm.distributed import parallel_state
        from vllm.distributed.eplb import eplb_state

        balancer = eplb_state.EplbState(config.parallel_config, torch.device("cpu"))
        with patch.object(eplb_state, "get_eplb_group", parallel_state.get_ep_group):
            balancer.add_model(model, config.model_config)

        def move(rows: list[list[int]]) -> None:
            balancer.policy = MagicMock()
            balancer.policy.rebalance_experts.return_value = torch.tensor(rows)
            with patch.object(torch, "Event", MagicMock()):  # of accelerators
                balancer.rearrange()

        yield known(config, model, balancer), model, move


def _load(config: Any) -> nn.Module:
    from vllm.model_executor.model_loader import get_model_loader

    loader = get_model_loader(config.load_config)
    model: nn.Module = loader.load_model(vllm_config=config, model_config=config.model_config)
    return model


def _join(parallel: Any, rank: int) -> None:
    """Be one rank of a group; the first call of a process decides of which."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    size: int = parallel.tensor_parallel_size
    if not distributed.is_initialized():
        alone = size == 1
        store = HashStore() if alone else FileStore(os.environ[RENDEZVOUS], size)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
        parallel_state.init_distributed_environment(size, rank, local_rank=rank, backend="gloo")
        parallel_state.ensure_model_parallel_initialized(size, 1)


@contextmanager
def _environment() -> Iterator[None]:
    with patch.dict(os.environ, {**_ENVIRONMENT, **os.environ, **_STOCK}):
        yield


@contextmanager
def _shortcuts() -> Iterator[None]:
    """Do as workers do, and look at model classes in this process.

    vLLM inspects each class in a process of its own, to keep CUDA out of the server's: ten seconds
    for every model that this machine has not inspected before.
    """
    from vllm.model_executor.models import registry

    def inspect(lazy: Any) -> Any:
        return registry._ModelInfo.from_model_cls(lazy.load_model_cls())

    with (
        patch.object(registry._LazyRegisteredModel, "inspect_model_cls", inspect),
        patch.object(torch.accelerator, "empty_cache", lambda *_, **__: None),
    ):
        yield
