"""Outputs of single vLLM layers for a fixed input, whatever the form of their weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from deltachain.replica.layout.layer_probe import probing_rows
from deltachain.replica.layout.members import tensors_in
from deltachain_vllm.compat import acts_last, allow_tiles, experts, linears

WIDTHS: Final = ("input_size_per_partition", "input_size", "embedding_dim")
"""Attributes with the number of columns of this rank's share of a layer."""

logger = logging.getLogger(__name__)


def computed(layer: nn.Module) -> Tensor | None:
    """Return the output of a linear layer, a head or experts; ``None`` if it cannot be run."""
    try:
        with torch.no_grad():
            if isinstance(layer, experts()):
                return _with_others(_of_experts(layer), layer, ("w13_", "w2_"))
            if isinstance(layer, linears()):
                return _with_others(_of_linear(layer), layer, ("weight", "bias"))
    except Exception as exc:  # noqa: BLE001 - then only its tensors are compared
        logger.debug("%s cannot be tried: %s", type(layer).__name__, exc)
    return None


def probe(layer: nn.Module, seed: int) -> Tensor | None:
    """Return the outputs of a layer for rows decided by a seed; ``None`` if it cannot be run."""
    try:
        with torch.no_grad():
            if isinstance(layer, experts()):
                return _of_experts(layer)
            if isinstance(layer, linears()):
                return _of_linear(layer, seed)
    except Exception as exc:  # noqa: BLE001 - then only its tensors are compared
        logger.debug("%s cannot be tried: %s", type(layer).__name__, exc)
    return None


def _with_others(output: Tensor | None, layer: nn.Module, used: tuple[str, ...]) -> Tensor | None:
    """Return an output with the tensors that a plain layer keeps for others, such as its router."""
    if output is None or "Unquantized" not in type(getattr(layer, "quant_method", None)).__name__:
        return output
    held = {**layer._parameters, **layer._buffers}
    others = [t for n, t in held.items() if t is not None and not n.startswith(used)]
    return torch.cat([t.detach().reshape(-1).float() for t in (output, *others)])


def taken_over(
    layers: Mapping[str, nn.Module], modules: Mapping[str, nn.Module]
) -> dict[str, Tensor]:
    """Return the tensors that attention layers made from the weight taken from a linear layer.

    Latent attention on CPUs with AMX does so: it computes in place of its ``kv_b_proj``.
    """
    empty = {
        layer: name
        for name, layer in layers.items()
        if isinstance(layer, linears()) and _has_no_weight(layer) and _waits(layer)
    }
    return {
        empty[part]: torch.cat([t.detach().reshape(-1).float() for _, t in held])
        for attention in modules.values()
        if empty and acts_last(attention)
        for part in attention.modules()
        if part in empty and (held := _made(attention))
    }


def _has_no_weight(layer: nn.Module) -> bool:
    weight = getattr(layer, "weight", None)
    return isinstance(weight, Tensor) and not weight.numel()


def _waits(layer: nn.Module) -> bool:
    """Return whether a layer is configured to leave its weight to another."""
    return bool(getattr(layer, "_cpu_skip_gemm_dispatch", False))


def _made(attention: nn.Module) -> list[tuple[str, Tensor]]:
    return [(n, t) for n, t in tensors_in(attention) if t.numel() and "kv_cache" not in n]


def _of_linear(layer: Any, seed: int | None = None) -> Tensor | None:  # noqa: ANN401 - of vLLM
    width = next((getattr(layer, name) for name in WIDTHS if hasattr(layer, name)), 0)
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    dtype = _dtype(layer, weight)
    if not width or dtype is None:
        return None
    rows = _rows(1, width, dtype, weight)
    if seed is not None:
        rows = probing_rows(rows, seed)
    output: Tensor = layer.quant_method.apply(layer, rows, bias)
    return output.float()


def _of_experts(layer: Any) -> Tensor:  # noqa: ANN401 - a layer of vLLM
    """Return outputs for one row per expert of this rank, regardless of the router's choice."""
    allow_tiles()
    weight = layer.w13_weight
    local = _local_experts(layer)
    rows = _rows(len(local), layer.hidden_size, layer.moe_config.in_dtype, weight)
    if layer.quant_method.is_monolithic:
        logits = torch.full((len(local), layer.global_num_experts), -1.0, device=weight.device)
        logits[torch.arange(len(local)), local] = 1.0
        output = layer.forward_monolithic(rows, logits)
    else:
        chosen = torch.tensor(local, device=weight.device, dtype=torch.int32)[:, None]
        weights = torch.ones(chosen.shape, device=weight.device)
        output = layer.forward_modular(rows, weights, chosen)
    found: Tensor = output.float()
    return found


def _local_experts(layer: Any) -> list[int]:  # noqa: ANN401 - a layer of vLLM
    where = layer.expert_map
    if where is None:
        return list(range(layer.local_num_experts))
    return [number for number, at in enumerate(where.tolist()) if at >= 0]


def _rows(count: int, width: int, dtype: torch.dtype, like: Any) -> Tensor:  # noqa: ANN401
    """Return rows without zeros, all different."""
    device = like.device if isinstance(like, Tensor) else None
    row = torch.linspace(0.5, 1.5, count * width, device=device).to(dtype)
    return row.view(count, width)


def _dtype(layer: Any, weight: object) -> torch.dtype | None:  # noqa: ANN401
    """Return the dtype of a layer's input: the dtype of its weight, if not quantised."""
    if isinstance(weight, Tensor) and weight.dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
    ):
        return weight.dtype
    found = getattr(layer, "params_dtype", None)
    return found if isinstance(found, torch.dtype) else None
