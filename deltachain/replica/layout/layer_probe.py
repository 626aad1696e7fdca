"""Probes of an engine's layers: their outputs, and their post-load processing.

Both engines build layers alike: a module with a ``weight`` and a ``quant_method``, which multiplies
by the weight, by a packed copy of it, or by another form of it made after loading.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn

COLUMNS: Final = 16
"""Number of columns of a weight that probing rows show."""

_RETURNING: Final = frozenset({"RESUME", "NOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"})
"""Instructions of a function that does nothing but return, in every Python since 3.11."""


def output_of(layer: Any) -> Tensor | None:  # noqa: ANN401 - a layer of an engine
    """Return a linear layer's output for a fixed row; ``None`` if it does not accept one."""
    bias = getattr(layer, "bias", None)
    width = getattr(layer, "input_size_per_partition", getattr(layer, "embedding_dim", 0))
    weight = getattr(layer, "weight", None)
    if not width or not isinstance(weight, Tensor) or not weight.is_floating_point():
        return None
    row = torch.linspace(0.5, 1.5, width, device=weight.device, dtype=weight.dtype)[None]
    try:
        output: Tensor = layer.quant_method.apply(layer, row, bias)
    except Exception:  # noqa: BLE001 - then only its parameters are compared
        return None
    return output.float()


def probing_rows(row: Tensor, seed: int) -> Tensor:
    """Return a row, and rows with a single one each, at columns chosen by a seed.

    Args:
        row: Row without zeros, ``[1, columns]``.
        seed: Seed of the choice.

    Returns:
        Rows of the same dtype on the same device, ``[1 + 16, columns]``, fewer if there are fewer
        columns.
    """
    width = row.shape[1]
    chosen = torch.randperm(width, generator=torch.Generator().manual_seed(seed))[:COLUMNS]
    rows = torch.zeros(len(chosen), width, dtype=row.dtype)
    rows[torch.arange(len(chosen)), chosen] = 1
    return torch.cat([row, rows.to(row.device)])


def is_plain(layer: Any) -> bool:  # noqa: ANN401 - a layer of an engine
    """Return whether a linear layer multiplies by a test weight, and adds a test bias."""
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
    except Exception:  # noqa: BLE001 - a layer that cannot be tested is not plain
        return False
    finally:
        for one, before in zip(members, saved, strict=True):
            one.data.copy_(before)


def processed(model: nn.Module) -> frozenset[str]:
    """Return the layers with post-load processing, and their sublayers."""
    return frozenset(
        part
        for name, layer in model.named_modules()
        if list(_processing(layer))
        for part, _ in layer.named_modules(prefix=name)
    )


def idle(modules: Mapping[str, nn.Module]) -> frozenset[str]:
    """Return the layers whose post-load processing only returns, and their sublayers.

    Engines inherit such an empty function in many quantisation methods. Layers inside a layer with
    any other processing are left out.

    Args:
        modules: All modules of a model, by name.
    """
    empty, acting = set[str](), set[str]()
    for name, layer in modules.items():
        methods = list(_processing(layer))
        if methods:
            (empty if all(map(_only_returns, methods)) else acting).add(name)
    return frozenset(
        name
        for name in modules
        if not empty.isdisjoint(_upwards(name)) and acting.isdisjoint(_upwards(name))
    )


def _processing(layer: nn.Module) -> Iterator[object]:
    for thing in (layer, getattr(layer, "quant_method", None)):
        method = getattr(thing, "process_weights_after_loading", None)
        if method is not None:
            yield method


def _upwards(name: str) -> Iterator[str]:
    """Yield the name of a layer, and those of the layers that it is in."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _only_returns(function: object) -> bool:
    """Return whether a function or method does nothing; anything else may act."""
    plain = function.__func__ if isinstance(function, MethodType) else function
    if not isinstance(plain, FunctionType):
        return False
    return _RETURNING.issuperset(step.opname for step in dis.get_instructions(plain))
