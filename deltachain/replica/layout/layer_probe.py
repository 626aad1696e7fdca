"""Test what the layers of an engine compute from.

Both engines build their layers alike: a module with a ``weight``, and beside it a ``quant_method``
that multiplies by it, by a packed copy of it, or by whatever else it made of it after loading.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def output_of(layer: Any) -> Tensor | None:  # noqa: ANN401 - a layer of an engine
    """Compute a linear layer on a fixed row; ``None`` where it takes no such row."""
    bias = getattr(layer, "bias", None)
    width = getattr(layer, "input_size_per_partition", getattr(layer, "embedding_dim", 0))
    weight = getattr(layer, "weight", None)
    if not width or not isinstance(weight, Tensor) or not weight.is_floating_point():
        return None
    row = torch.linspace(0.5, 1.5, width, device=weight.device, dtype=weight.dtype)[None]
    try:
        output: Tensor = layer.quant_method.apply(layer, row, bias)
    except Exception:  # noqa: BLE001 - then its parameters must speak for it
        return None
    return output.float()


def is_plain(layer: Any) -> bool:  # noqa: ANN401 - a layer of an engine
    """Whether a linear layer multiplies by a pattern in its weight, and adds one in its bias."""
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    members = [one for one in (weight, bias) if isinstance(one, Tensor)]
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        return False
    saved = [one.detach().clone() for one in members]
    rows, columns = weight.shape
    try:
        pattern = torch.arange(rows * columns, device=weight.device).remainder(251)
        weight.data.copy_(pattern.view(rows, columns))
        if isinstance(bias, Tensor):
            bias.data.copy_(torch.arange(bias.numel(), device=bias.device).remainder(241))
        one_hot = torch.zeros(1, columns, dtype=weight.dtype, device=weight.device)
        one_hot[0, columns // 2] = 1
        added = 0 if bias is None else bias.data
        expected = weight.data[:, columns // 2] + added
        found = layer.quant_method.apply(layer, one_hot, bias).view(-1)
        return bool(torch.equal(found, expected))
    except Exception:  # noqa: BLE001 - a layer that cannot be tried is not believed
        return False
    finally:
        for one, before in zip(members, saved, strict=True):
            one.data.copy_(before)


def processed(model: nn.Module) -> frozenset[str]:
    """Layers with post-load processing, and the layers in them."""

    def acts(thing: object) -> bool:
        return hasattr(thing, "process_weights_after_loading")

    return frozenset(
        part
        for name, layer in model.named_modules()
        if acts(layer) or acts(getattr(layer, "quant_method", None))
        for part, _ in layer.named_modules(prefix=name)
    )
