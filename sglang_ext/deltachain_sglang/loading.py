"""Loading of models in SGLang: all of its code that may differ between versions."""

import copy
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deltachain.checkpoint import named_folder
from deltachain.errors import UnsupportedEngineError

from . import compat


def guard(model: nn.Module) -> None:
    """Refuse models that SGLang itself refuses to update: others share their weights."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    mode = compat.context().get_model().weight_cache_mode
    if mode != "off":
        raise UnsupportedEngineError(
            "the weights are shared with other engines by SGLang's weight cache",
            hint="start it with --weight-cache-mode off",
        )
    error = weight_updater._unsupported_derived_weight_cache_error(model)
    if error:
        raise UnsupportedEngineError(f"SGLang refuses to update these weights: {error}")


def in_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    context: AbstractContextManager[None] = set_default_torch_dtype(dtype)
    return context


def acting(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, Any]]:
    """Return the modules with post-load processing, each with the object that does it."""
    from sglang.srt.lora.layers import BaseLayerWithLoRA

    return [
        (module, module.quant_method)
        for module in modules
        if getattr(module, "quant_method", None) is not None
        and not isinstance(
            module, BaseLayerWithLoRA
        )  # it forwards the attribute of its inner layer
    ]


def is_quantised(module: nn.Module) -> bool:
    """Return whether a layer has quantised weights, or scales of keys and values."""
    acts = [type(method).__name__ for _, method in acting([module])]
    return any("Unquantized" not in name for name in acts)


def restore(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Unpack all modules that SGLang can unpack, before weights are loaded again."""
    from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
    from sglang.srt.model_loader.loader import device_loading_context

    for module, method in acting(modules):
        if isinstance(method, QuantizeMethodBase):
            with device_loading_context(module, device):
                method.restore_weights_before_loading(module)


def process(modules: Iterable[nn.Module], device: torch.device) -> None:
    from sglang.srt.model_loader.loader import device_loading_context

    for module, method in acting(modules):
        with device_loading_context(module, device):
            method.process_weights_after_loading(module)


def load(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
    """Call the model's own loader as SGLang does, without packing."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    DefaultModelLoader.load_weights_only(model, tensors, device)


def is_reloadable(model: nn.Module) -> bool:
    """Return whether a model is updated only by restoring, loading and packing."""
    from sglang.srt.model_loader.loader import QuantizedRLModelLoader

    return not QuantizedRLModelLoader.is_reload_scenario(model)


def raw(config: Any) -> nn.Module:
    """Create a second model of the same kind on the meta device, as SGLang does before loading."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import loader

    ours = copy.copy(config)
    ours.hf_config = copy.deepcopy(config.hf_config)  # models edit theirs during construction
    how = LoadConfig()
    with _globals_kept(), in_dtype(config.dtype), torch.device("meta"):
        quantisation = loader._get_quantization_config(ours, how)
        model: nn.Module = loader._initialize_model(ours, how, quantisation)
    return model.eval()


@contextmanager
def _globals_kept() -> Iterator[None]:
    """Restore SGLang's registries of layers, by name or shape, at the end."""
    found = {
        id(value): value
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "sglang"
        for key, value in list(vars(module).items())
        if type(value) in (dict, list, set, defaultdict) and not key.startswith("__")
    }
    before = [(value, value.copy()) for value in found.values()]
    try:
        yield
    finally:
        for value, kept in before:
            _refill(value, kept)


def _refill(value: Any, kept: Any) -> None:
    if _parts(value) == _parts(kept):
        return
    value.clear()
    if isinstance(value, list):
        value.extend(kept)
    else:
        value.update(kept)


def _parts(value: Any) -> list[int]:
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
    return [id(part) for part in inner]


def linears() -> tuple[type[nn.Module], ...]:
    from sglang.srt.layers.linear import LinearBase

    return (LinearBase,)


def heads() -> tuple[type[nn.Module], ...]:
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    return (ParallelLMHead,)


def experts() -> tuple[type[nn.Module], ...]:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    return (FusedMoE,)


def slots(modules: Mapping[str, nn.Module]) -> dict[str, tuple[int, ...]]:
    """Return the experts in the slots of this rank, by layer; shared ones have numbers below 0."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    found: dict[str, tuple[int, ...]] = {}
    where: Any = get_global_expert_location_metadata() if compat.moves_experts() else None
    layers: Mapping[str, Any] = modules if where else {}
    for name, layer in layers.items():
        if issubclass(type(layer), experts()) and layer.uses_expert_location:
            shared = layer.num_fused_shared_experts
            count = layer.num_local_experts - shared
            row = where.physical_to_logical_map_cpu[layer.layer_id].tolist()
            mine = row[count * layer.moe_ep_rank :][:count]
            found[name] = (*mine, *range(-shared, 0))
    return found


def logits(head: Any, rows: Tensor) -> Tensor | None:
    """Return SGLang's logits of a quantised or packed head; ``None`` for any other head."""
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
    from sglang.srt.utils import use_intel_amx_backend

    bias = getattr(head, "bias", None)
    found: Tensor
    if should_apply_lm_head_quant_method(head, head.quant_method):
        found = head.quant_method.apply(head, rows, bias)
    elif use_intel_amx_backend(head):
        row = rows.to(head.weight.dtype)
        found = torch.ops.sgl_kernel.weight_packed_linear(row, head.weight, bias, True)
    else:
        return None
    return found.float()


def numbers_local_experts(layer: Any) -> bool:
    """Return whether the kernel of experts gets numbers among those of its rank."""
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatcher

    found = layer.dispatcher
    return isinstance(found, StandardDispatcher) and not found.skip_local_expert_mapping


def of_experts(layer: Any, rows: Tensor) -> Tensor:
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    count = len(rows)
    chosen = torch.arange(count, device=rows.device, dtype=torch.int32)[:, None]
    weights = torch.ones(count, 1, device=rows.device, dtype=torch.float32)
    scores = torch.zeros(count, count, device=rows.device, dtype=torch.float32)
    routed = StandardDispatchOutput(
        hidden_states=rows,
        hidden_states_scale=None,
        topk_output=StandardTopKOutput(weights, chosen, scores),
    )
    found: Tensor = layer.run_moe_core(dispatch_output=routed).hidden_states
    return found


def checkpoint(config: Any = None) -> Path:
    """Return the folder that SGLang loaded; for a repository name, its folder in the Hub's cache.

    ``config`` is that of a rank, which includes later loads; the server's by default.
    """
    server = compat.context().get_model()
    named = config or server
    return named_folder(named.model_path, revision=named.revision, cache=server.download_dir)
