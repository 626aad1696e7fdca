"""What the layers of an engine compute from, tried out; and layers put back as they were.

Both engines build their layers alike: a module with a ``weight``, and beside it a ``quant_method``
that multiplies by it, by a packed copy of it, or by whatever else it made of it after loading.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn


def follows(layer: Any) -> bool:  # noqa: ANN401 - a layer of an engine
    """Whether the output of a linear layer changes when one element of its weight does."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        return True  # nothing that could be written in place: reading back will tell
    if not weight.numel() or weight.is_meta:
        return True
    probe = torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
    probe[0, 0] = 1
    corner = weight.data[0, 0]
    kept = corner.clone()
    try:
        seen = []
        for value in (1.0, 2.0):
            corner.fill_(value)
            seen.append(float(layer.quant_method.apply(layer, probe).view(-1)[0]))
    except Exception:  # noqa: BLE001 - a layer that can not be tried is not believed
        return False
    finally:
        corner.copy_(kept)
    return seen == [1.0, 2.0]


def output_of(layer: Any) -> Tensor | None:  # noqa: ANN401 - a layer of an engine
    """What a linear layer computes from a fixed row; ``None`` where it takes no such row."""
    width = getattr(layer, "input_size_per_partition", getattr(layer, "embedding_dim", 0))
    weight = getattr(layer, "weight", None)
    if not width or not isinstance(weight, Tensor) or not weight.is_floating_point():
        return None
    row = torch.linspace(0.5, 1.5, width, device=weight.device, dtype=weight.dtype)[None]
    try:
        output: Tensor = layer.quant_method.apply(layer, row)
    except Exception:  # noqa: BLE001 - then its parameters must speak for it
        return None
    return output.float()


@dataclass(frozen=True, slots=True)
class Members:
    """Everything that a module has of its own, as it was.

    Attributes:
        layer: The module.
        attributes: Its plain ones.
        parameters: By name.
        buffers: By name.
    """

    layer: nn.Module
    attributes: dict[str, Any]
    parameters: dict[str, Any]
    buffers: dict[str, Any]

    @classmethod
    def of(cls, layer: nn.Module) -> Self:
        """Those of a module now; tensors are not copied."""
        return cls(layer, dict(vars(layer)), dict(layer._parameters), dict(layer._buffers))

    def put_back(self) -> None:
        """Make the module what it was."""
        _fill(vars(self.layer), self.attributes)
        _fill(self.layer._parameters, self.parameters)
        _fill(self.layer._buffers, self.buffers)


@contextmanager
def restoring(model: nn.Module) -> Iterator[None]:
    """Put the members of all layers, and of their quantisation methods, back if the body raises."""
    layers = [Members.of(layer) for layer in model.modules()]
    methods = [(m, dict(vars(m))) for layer in model.modules() for m in _methods(layer)]
    try:
        yield
    except BaseException:
        for members in layers:
            members.put_back()
        for method, attributes in methods:
            _fill(vars(method), attributes)
        raise


def _methods(layer: nn.Module) -> Iterator[Any]:
    method = getattr(layer, "quant_method", None)
    if method is not None and hasattr(method, "__dict__"):
        yield method


def _fill(members: dict[str, Any], before: dict[str, Any]) -> None:
    members.clear()
    members.update(before)
