"""Everything that may differ between versions of vLLM, and the range that was tested."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final

import torch
from torch import Tensor, nn

from deltachain.errors import ConfigError, EngineVersionError
from deltachain.replica.engine_version import VersionRange
from deltachain.replica.layout.runtime_tables import record_loaded_state

TESTED: Final = VersionRange("vLLM", first=(0, 32), beyond=(0, 34))
"""0.33 has no build for CPUs: what is used of it was imported and read, no test was run."""

PAUSES: Final = ("keep", "wait", "abort")
"""Pause modes: running requests go on afterwards, are waited for, or end early."""


def check_version() -> str:
    """The version of the vLLM that is installed.

    Raises:
        EngineVersionError: It was not tested.
    """
    import vllm  # noqa: PLC0415

    return TESTED.check(vllm.__version__)


def check_layout(client: Any, arguments: Namespace) -> None:  # noqa: ANN401 - vLLM's client
    """Refuse a server with several engines, or with several processes that take its requests.

    Those come with the engines, unless their number was given: the engines are told of first.

    Args:
        client: Of the server.
        arguments: Of its command line.

    Raises:
        ConfigError: This server has them.
    """
    parallel = getattr(getattr(client, "vllm_config", None), "parallel_config", None)
    engines = getattr(parallel, "data_parallel_size", 1)
    if engines > 1:
        raise ConfigError(
            f"this server has {engines} data-parallel engines, a replica has one",
            hint=f"start {engines} servers without --data-parallel-size, and a router before them",
        )
    front_ends = getattr(arguments, "api_server_count", None) or 1
    if front_ends > 1:
        raise ConfigError(
            f"this server has {front_ends} front ends, a replica has one leader",
            hint="start it with --api-server-count 1",
        )


def layerwise() -> Any:  # noqa: ANN401 - vLLM's module
    """The layerwise reload that comes with vLLM.

    Raises:
        EngineVersionError: This vLLM has none that we know.
    """
    try:
        from vllm.model_executor.model_loader.reload import layerwise as module  # noqa: PLC0415
    except ImportError as exc:
        raise EngineVersionError(f"this vLLM has no layerwise reload: {exc}") from exc
    return module


_REMEMBERS: Final = "deltachain_remembers"
"""An attribute of a loader's method that records what it loaded."""


def remember_loaded() -> None:
    """Have vLLM's loaders record what a model holds before it runs; again changes nothing."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader  # noqa: PLC0415

    original = BaseModelLoader.load_model
    if hasattr(original, _REMEMBERS):
        return

    @wraps(original)
    def load_model(*args: Any, **kwargs: Any) -> nn.Module:  # noqa: ANN401 - vLLM's
        model: nn.Module = original(*args, **kwargs)
        record_loaded_state(model)
        return model

    setattr(load_model, _REMEMBERS, True)
    BaseModelLoader.load_model = load_model


def linears() -> tuple[type, ...]:
    """Classes of layers that multiply by a parameter called ``weight``."""
    from vllm.model_executor.layers.linear import LinearBase  # noqa: PLC0415
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # noqa: PLC0415
        VocabParallelEmbedding,
    )

    return LinearBase, VocabParallelEmbedding


def experts() -> type:
    """The class of layers that hold the weights of routed experts."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts  # noqa: PLC0415

    found: type = RoutedExperts
    return found


def allow_tiles() -> None:
    """Ask Linux for AMX, as vLLM's kernels do on a way to their first use; without, it kills us.

    What experts compute may be tried before the engine has run a single step.
    """
    if hasattr(torch.cpu, "_init_amx") and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def own_loader(tensor: Any) -> None:  # noqa: ANN401 - with attributes of vLLM's
    """Give a tensor the loader that a reload put its own in front of.

    vLLM takes it away where something was loaded. Left there, it drops whatever it is given. It is
    put before functions only: a loader without a name, such as a partial one, is a tensor's own.
    """
    if hasattr(getattr(tensor, "weight_loader", None), "__name__"):
        loader = layerwise()._get_original_loader(tensor)
        if loader is not tensor.weight_loader:
            tensor.weight_loader = loader


UNRECORDED: Final = frozenset({"bias"})
"""Parameters that vLLM's record of how a layer was created leaves out."""


def left_alone() -> frozenset[str]:
    """Parameters and buffers that vLLM's reload leaves as they are: ``bias``, tables of experts."""
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS  # noqa: PLC0415

    return frozenset(SKIP_TENSORS)


_MADE_ONCE: Final = ("moe_kernel", "moe_quant_config")
"""What a method for experts makes when it first acts. While it is there, raw weights are taken for
packed ones."""


def acts_last(layer: nn.Module) -> bool:
    """Whether a layer acts after loading when all others have."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer  # noqa: PLC0415

    return bool(is_deferred_attention_layer(layer))


def process(layer: nn.Module) -> None:
    """Let the method of a layer act after loading, if it has one."""
    from vllm.model_executor.layers.quantization.base_config import (  # noqa: PLC0415
        QuantizeMethodBase,
    )

    method = getattr(layer, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        method.process_weights_after_loading(layer)
        if hasattr(layer, "update_param_tp_status"):
            layer.update_param_tp_status()  # type: ignore[operator]


@contextmanager
def as_before_processing(layer: nn.Module) -> Iterator[None]:
    """Make the method of a layer forget that it acted; what it made the first time is put back.

    Kernels of experts hold no weights but parameters of the layer, which stay where they are.
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


def raw_dtype(layer: nn.Module, parameter: Tensor) -> torch.dtype:
    """The dtype that a parameter was created with: CPUs widen biases of small layers."""
    found = getattr(layer, "params_dtype", None)
    return found if isinstance(found, torch.dtype) else parameter.dtype


def mode_in_doubt(mode: str) -> str:
    """The pause mode for weights that nothing more may be generated with."""
    return "keep" if mode == "wait" else mode


async def pause(client: Any, mode: str, *, clear: bool) -> None:  # noqa: ANN401 - vLLM's client
    """Pause the scheduler, and return once it stands still.

    vLLM's own ``pause_generation`` does this and then sleeps for 20 ms, so that those who wait for
    requests that it aborted are answered first. Nothing here waits for them, and the sleep was
    half of all that a swap took in a server.

    Args:
        client: vLLM's ``AsyncLLM``, or any other ``EngineClient``.
        mode: One of vLLM's.
        clear: Whether cached prefixes go.
    """
    scheduler = getattr(getattr(client, "engine_core", None), "pause_scheduler_async", None)
    front = getattr(getattr(client, "renderer", None), "clear_mm_cache_async", None)
    if scheduler is None or front is None:
        await client.pause_generation(mode=mode, clear_cache=clear)
        return
    if clear:
        await front()
    await scheduler(mode=mode, clear_cache=clear)
