"""Outputs of single SGLang layers for a fixed input, whatever the form of their weights."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from deltachain.replica.layout.layer_probe import probing_rows
from deltachain_sglang import loading

logger = logging.getLogger(__name__)


def computed(layer: nn.Module, dtype: torch.dtype) -> Tensor | None:
    """Return the output of a linear layer, a head or experts; ``None`` if it cannot be run.

    Args:
        layer: Layer of the model.
        dtype: Dtype of activations.
    """
    return _computed(layer, dtype, None)


def probe(layer: nn.Module, dtype: torch.dtype, seed: int) -> Tensor | None:
    """Return the outputs of a layer for rows decided by a seed; ``None`` if it cannot be run."""
    return _computed(layer, dtype, seed)


def _computed(layer: nn.Module, dtype: torch.dtype, seed: int | None) -> Tensor | None:
    try:
        with torch.no_grad():
            if isinstance(layer, loading.experts()):
                return _of_experts(layer, dtype)
            if isinstance(layer, loading.heads()):
                return _of_head(layer, dtype, seed)
            if isinstance(layer, loading.linears()):
                return _of_linear(layer, dtype, seed)
    except Exception as exc:  # noqa: BLE001 - then only its tensors are compared
        logger.debug("%s cannot be tried: %s", type(layer).__name__, exc)
    return None


def _of_head(
    layer: Any,  # noqa: ANN401 - a layer of SGLang
    dtype: torch.dtype,
    seed: int | None,
) -> Tensor | None:
    return loading.logits(layer, _probing(layer.embedding_dim, dtype, layer, seed))


def _of_linear(layer: Any, dtype: torch.dtype, seed: int | None) -> Tensor:  # noqa: ANN401
    width = getattr(layer, "input_size_per_partition", layer.input_size)
    bias = getattr(layer, "bias", None)
    output: Tensor = layer.quant_method.apply(layer, _probing(width, dtype, layer, seed), bias)
    return output.float()


def _of_experts(layer: Any, dtype: torch.dtype) -> Tensor | None:  # noqa: ANN401
    """Return outputs for one row per expert, regardless of the router's choice."""
    if layer.moe_ep_size > 1:
        return None  # only a dispatcher, which calls other ranks, knows the experts of this rank
    rows = _rows(layer.num_experts, layer.hidden_size, dtype, layer)
    output: Tensor = loading.of_experts(layer, rows)
    return output.float()


def _probing(width: int, dtype: torch.dtype, layer: nn.Module, seed: int | None) -> Tensor:
    """Return a row without zeros; with a seed, others that show columns as well."""
    row = _rows(1, width, dtype, layer)
    return row if seed is None else probing_rows(row, seed)


def _rows(count: int, width: int, dtype: torch.dtype, layer: nn.Module) -> Tensor:
    """Return rows without zeros, all different."""
    device = next(layer.parameters()).device
    row = torch.linspace(0.5, 1.5, count * width, device=device)
    return row.to(dtype).view(count, width)
