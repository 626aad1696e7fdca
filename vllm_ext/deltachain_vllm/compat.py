"""All code that may differ between versions of vLLM."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn

from deltachain.errors import EngineVersionError, UnsupportedEngineError
from deltachain.replica.layout.heads import DraftOnly, WithHeads
from deltachain.replica.layout.runtime_tables import record_loaded_state

from .table import BALANCED, TABLE


def check_version(*uses: str) -> str:
    """Return the version of the installed vLLM, if it has all names that these uses need."""
    import vllm

    TABLE.check(vllm.__version__, uses)
    return str(vllm.__version__)


def check_layout(config: Any, *, in_process: bool = False) -> None:
    """Refuse engines whose weights cannot be proven at all times, or whose experts move."""
    if getattr(getattr(config, "load_config", None), "load_format", "") == "dummy":
        raise UnsupportedEngineError(
            "this engine starts with random weights (--load-format dummy), not with a checkpoint",
            hint="start it without --load-format dummy",
        )
    if shares_experts(config) and (in_process or config.model_config.enable_sleep_mode):
        raise UnsupportedEngineError(
            "engines of several programs share experts, and one may release its weights alone "
            "(--enable-sleep-mode), or is no server",
            hint="let vllm serve start each, without --enable-sleep-mode",
        )
    check_experts(config)


def shares_experts(config: Any) -> bool:
    """Return whether this server and others have engines that share experts and step together."""
    parallel: Any = getattr(config, "parallel_config", None)
    apart = getattr(parallel, "local_engines_only", False)
    return bool(apart and parallel.data_parallel_size > 1 and config.model_config.is_moe)


def rank_of(parallel: Any, rank: int) -> int:
    """Return the number of a worker among the workers of all engines that its leader calls.

    Args:
        parallel: vLLM's configuration of its engine, which has one engine if they share nothing.
        rank: Its rank in that engine.
    """
    if parallel.local_engines_only and parallel.data_parallel_size > 1:
        return int(parallel.data_parallel_index * parallel.world_size + rank)
    if parallel.data_parallel_external_lb or int(os.environ.get("VLLM_DP_SIZE") or 1) > 1:
        return rank  # a server or a program for each engine
    of_server = parallel.data_parallel_rank_local or 0
    engine = of_server if parallel.data_parallel_hybrid_lb else parallel.data_parallel_index
    return int(engine * parallel.world_size + rank)


async def call_engines(client: Any, method: str) -> list[str]:
    """Call a method of the core of every engine; return all replies."""
    core = client.engine_core
    if hasattr(core, "call_utility_all_async"):
        return list(await core.call_utility_all_async(method))
    return [await core.call_utility_async(method)]


async def call_workers(
    client: Any, method: str, *args: str, limit_s: float | None = None
) -> list[Any]:
    """Call a method of every worker; return all replies, engine by engine.

    vLLM's ``collective_rpc`` calls all engines, and returns the replies of the first one. Without a
    limit an engine waits forever for a worker of another node that has ended, and does no step.
    """
    call_all = getattr(getattr(client, "engine_core", None), "call_utility_all_async", None)
    if call_all is not None:
        engines = await call_all("collective_rpc", method, limit_s, args, None)
        return [reply for replies in engines for reply in replies]
    if client.vllm_config.parallel_config.data_parallel_size > 1:
        raise EngineVersionError("this vLLM returns replies of its first data-parallel engine only")
    found: list[Any] = await client.collective_rpc(method, limit_s, args)
    return found


def let_meet(method: str) -> None:
    """Give the core of an engine a method that returns where the store of its group is."""
    from vllm.v1.engine.core import EngineCore

    def meeting(core: Any) -> tuple[str, int]:
        return core.dp_store.host, core.dp_store.port

    setattr(EngineCore, method, meeting)


def front_end_of(client: Any) -> tuple[int, int]:
    """Return the number of this front end of a server, and how many there are."""
    core = getattr(client, "engine_core", None)
    return getattr(core, "client_index", 0), getattr(core, "client_count", 1)


def check_experts(config: Any, *, has_map: bool = True) -> None:
    """Refuse ranks that come and go, and experts that move without a map that can be read."""
    parallel: Any = getattr(config, "parallel_config", None)
    if getattr(parallel, "enable_elastic_ep", False):
        raise UnsupportedEngineError(
            "ranks of this engine come and go while it serves (--enable-elastic-ep), and no update "
            "reaches the new ones",
            hint="start it without --enable-elastic-ep",
        )
    if getattr(parallel, "enable_eplb", False):
        check_version(BALANCED)
        if not has_map:
            raise UnsupportedEngineError(
                "this engine moves experts (--enable-eplb), and its worker has no map of them",
                hint="start it without --enable-eplb",
            )


_SOME: Final = "vllm.model_executor.model_loader.mtp_validation"


def has_heads(config: Any) -> bool:
    """Return whether an engine drafts with heads of its model's checkpoint, whose places are known.

    The map of experts that move is the model's alone.
    """
    found = getattr(config, "speculative_config", None)
    draft = getattr(found, "draft_model_config", None)
    return (
        getattr(found, "method", "") == "mtp"
        and getattr(draft, "model", "") == config.model_config.model
        and not getattr(config.parallel_config, "enable_eplb", False)
        and find_spec(_SOME) is not None
    )


def draft_model(runner: Any) -> nn.Module | None:
    """Return the model that drafts in a worker, also one in captured graphs; ``None`` for none."""
    if hasattr(runner, "get_draft_model"):
        found = runner.get_draft_model()
    else:  # vLLM 0.30 and earlier
        found = getattr(getattr(runner, "drafter", None), "model", None)
    return found if isinstance(found, nn.Module) else None


def draft_of(draft: nn.Module, model: nn.Module) -> DraftOnly:
    """Return a draft that follows a chain of its own, without what it shares with the model."""
    return DraftOnly(draft, model, own_loader=own_loader)


def draft_config(config: Any) -> Any:
    """Return the configuration of an engine as that of its draft."""
    found = copy.copy(config)
    found.model_config = config.speculative_config.draft_model_config
    found.speculative_config = None
    return found


def with_heads(model: Any, heads: Any) -> WithHeads:
    """Return a model with its heads, which may load some of their tensors without the others."""
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

    return WithHeads(model, heads, partly=disable_mtp_completeness_check, own_loader=own_loader)


_HOOKED: Final = "deltachain_hooked"  # attribute that marks methods of vLLM as hooked


def hook(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Wrap a method in a function that gets it before its arguments; idempotent."""
    original = getattr(owner, name)
    if is_hooked(original):
        return

    @wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(hooked, _HOOKED, True)
    setattr(owner, name, hooked)


def is_hooked(method: Any) -> bool:
    return hasattr(method, _HOOKED)


def _look(owner: Any, name: str, look: Callable[[Any], None]) -> None:
    """Let a function look at what a method returns."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        returned = original(*args, **kwargs)
        look(returned)
        return returned

    hook(owner, name, around)


def check_configured(check: Callable[[Any], None]) -> None:
    """Hook the configuration of a server's first process, before it starts others; idempotent.

    vLLM's first process turns the exit code of a front end that it started into 1.
    """
    from vllm.engine.arg_utils import EngineArgs

    _look(EngineArgs, "create_engine_config", check)


def remember_loaded() -> None:
    """Hook vLLM's loaders, to record a model's members before it runs; idempotent."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    _look(BaseModelLoader, "load_model", record_loaded_state)


def layerwise() -> Any:
    try:
        from vllm.model_executor.model_loader.reload import layerwise as module
    except ImportError as exc:
        raise EngineVersionError(f"this vLLM has no layerwise reload: {exc}") from exc
    return module


def linears() -> tuple[type, ...]:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return LinearBase, VocabParallelEmbedding


def experts() -> type:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    found: type = RoutedExperts
    return found


def allow_tiles() -> None:
    """Request AMX from Linux, which kills processes that use it without a request.

    vLLM's kernels request it in their own first step, but experts may be tested before that.
    """
    if hasattr(torch.cpu, "_init_amx") and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def own_loader(tensor: Any) -> None:
    """Give a tensor back the loader that a reload wrapped in its own.

    vLLM removes its wrapper only if something was loaded; a remaining one drops its input. Only
    functions are wrapped: a loader without a name, such as a partial, is the tensor's own.
    """
    if hasattr(getattr(tensor, "weight_loader", None), "__name__"):
        loader = layerwise()._get_original_loader(tensor)
        if loader is not tensor.weight_loader:
            tensor.weight_loader = loader


UNRECORDED: Final = frozenset({"bias"})  # parameters missing in vLLM's record of a layer's creation


def left_alone() -> frozenset[str]:
    """Return names of parameters and buffers that vLLM's reload skips: ``bias``, expert tables."""
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    return frozenset(SKIP_TENSORS)


_MADE_ONCE: Final = ("moe_kernel", "moe_quant_config")
"""Attributes that a method for experts creates at its first post-load processing. While they exist,
raw weights are taken for packed ones."""


def acts_last(layer: nn.Module) -> bool:
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    return bool(is_deferred_attention_layer(layer))


def _method_of(layer: nn.Module) -> Any:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(layer, "quant_method", None)
    return method if isinstance(method, QuantizeMethodBase) else None


def process(layer: nn.Module) -> None:
    """Run the post-load processing of a layer's method, if it has one."""
    method = _method_of(layer)
    if method is not None:
        method.process_weights_after_loading(layer)
        if hasattr(layer, "update_param_tp_status"):
            layer.update_param_tp_status()  # type: ignore[operator]


_MULTIPLIES: Final = "cpu_linear"  # of layers on CPUs: multiplies by the weight or a packed copy


def computes_alike(layer: Any, packed: Any) -> bool:
    """Let a layer multiply by what was packed of the same weight for another; return whether.

    vLLM packs a head twice that is tied to its embedding. Only layers without a bias can share.
    """
    weights = [one._parameters.get("weight") for one in (layer, packed)]
    if any(one is None or not one.numel() for one in weights):
        return False
    methods = {type(_method_of(one)) for one in (layer, packed)}
    has_bias = any(one._parameters.get("bias") is not None for one in (layer, packed))
    forms = {(one.data_ptr(), one.shape, one.stride(), one.dtype) for one in weights}
    if len(methods) > 1 or has_bias or len(forms) > 1:
        return False
    if is_quantised(layer) or not all(_MULTIPLIES in vars(one) for one in (layer, packed)):
        return False
    setattr(layer, _MULTIPLIES, getattr(packed, _MULTIPLIES))
    return True


def is_quantised(layer: nn.Module) -> bool:
    """Return whether a layer has quantised weights, or scales of keys and values."""
    method = _method_of(layer)
    return method is not None and "Unquantized" not in type(method).__name__


@contextmanager
def as_before_processing(layer: nn.Module) -> Iterator[None]:
    """Reset the state of a layer's method to before processing; restore its first state at the end.

    Kernels of experts hold no weights except parameters of the layer, which keep their memory.
    """
    layer.__dict__.pop("_already_called_process_weights_after_loading", None)
    method = getattr(layer, "quant_method", None)
    made = {name: getattr(method, name) for name in _MADE_ONCE if hasattr(method, name)}
    for name in made:
        setattr(method, name, None)
    yield
    for name, value in made.items():
        if value is not None:
            setattr(method, name, value)


def copy_record(layer: nn.Module, copied: nn.Module) -> None:
    """Give a copy of a layer the record of the layer's creation, with loaders of its own."""
    from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel

    steps = layerwise()
    before, after = steps.get_layerwise_info(layer), steps.get_layerwise_info(copied)

    def mine(value: Any) -> Any:
        is_method = isinstance(value, MethodType)
        if is_method and (value.__self__ is layer or value.__self__ is layer_ref_sentinel):
            return value.__func__.__get__(copied)
        return value

    def own(tensor: Any) -> Any:
        found: Any = tensor.data
        found.__class__ = tensor.__class__
        found.__dict__ = {key: mine(value) for key, value in vars(tensor).items()}
        return found

    after.restore_device = before.restore_device
    after.restore_metadata = tuple(
        {name: own(tensor) for name, tensor in held.items()} for held in before.restore_metadata
    )


def forget_scales(attention: nn.Module) -> None:
    """Reset the scales of keys and values of a layer to those that it was created with."""
    from vllm.model_executor.layers.attention import attention as module

    if hasattr(attention, "_k_scale"):
        module.set_default_quant_scales(attention, register_buffer=False)


def raw_dtype(layer: nn.Module, parameter: Tensor) -> torch.dtype:
    """Return the original dtype of a parameter: on CPUs, biases of small layers are widened."""
    found = getattr(layer, "params_dtype", None)
    return found if isinstance(found, torch.dtype) else parameter.dtype


async def pause(client: Any, mode: str, *, clear: bool) -> None:
    """Pause the scheduler, and return once it has stopped.

    vLLM's own ``pause_generation`` does this and then sleeps for 20 ms, so that clients of aborted
    requests get their replies first. That is not needed here, and the sleep was half of the time of
    a swap in a server.
    """
    scheduler = getattr(getattr(client, "engine_core", None), "pause_scheduler_async", None)
    front = getattr(getattr(client, "renderer", None), "clear_mm_cache_async", None)
    if scheduler is None or front is None:
        await client.pause_generation(mode=mode, clear_cache=clear)
        return
    if clear:
        await front()
    await scheduler(mode=mode, clear_cache=clear)
