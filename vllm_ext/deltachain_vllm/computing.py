"""What single layers of vLLM compute from a fixed input, whatever they made of their weights."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from deltachain_vllm.compat import experts, linears

logger = logging.getLogger(__name__)


def computed(layer: nn.Module) -> Tensor | None:
    """What a linear layer, a head or experts compute; ``None`` where a layer cannot be tried."""
    try:
        with torch.no_grad():
            if isinstance(layer, experts()):
                return _of_experts(layer)
            if isinstance(layer, linears()):
                return _of_linear(layer)
    except Exception as exc:  # noqa: BLE001 - then its tensors must speak for it
        logger.debug("%s cannot be tried: %s", type(layer).__name__, exc)
    return None


def _of_linear(layer: Any) -> Tensor | None:  # noqa: ANN401 - a layer of vLLM
    width = getattr(layer, "input_size_per_partition", getattr(layer, "embedding_dim", 0))
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    dtype = _dtype(layer, weight)
    if not width or dtype is None:
        return None
    output: Tensor = layer.quant_method.apply(layer, _rows(1, width, dtype, weight), bias)
    return output.float()


def _of_experts(layer: Any) -> Tensor:  # noqa: ANN401 - a layer of vLLM
    """One row for each expert of this rank, whatever the router would have chosen."""
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
    """Rows without a zero, all different."""
    device = like.device if isinstance(like, Tensor) else None
    row = torch.linspace(0.5, 1.5, count * width, device=device).to(dtype)
    return row.view(count, width)


def _dtype(layer: Any, weight: object) -> torch.dtype | None:  # noqa: ANN401
    """Of what a layer is given: its weight's own where it is not quantised."""
    if isinstance(weight, Tensor) and weight.dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
    ):
        return weight.dtype
    found = getattr(layer, "params_dtype", None)
    return found if isinstance(found, torch.dtype) else None
