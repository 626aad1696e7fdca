"""The methods by which an engine loads tensors again; each leaves live tensors where they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor, nn

from deltachain.replica.engine import EngineModel
from deltachain.replica.layout.members import restoring

LoadMethod: TypeAlias = Literal["loaded", "reloaded", "repacked"]

RELOADS: Final[tuple[LoadMethod, ...]] = ("reloaded", "repacked")
"""Methods that make whole layers again, in the order in which they are tried."""


@dataclass(frozen=True, slots=True)
class LoadGroup:
    """Checkpoint tensors that are loaded together or not at all.

    Attributes:
        names: Of the tensors, in the order of the chain.
        layers: The layers that they are loaded into, and those that share live elements with
            these. Empty where that is not known.
    """

    names: tuple[str, ...]
    layers: frozenset[str]


def load_with(
    model: EngineModel,
    method: LoadMethod,
    layers: frozenset[str],
    weights: Iterable[tuple[str, Tensor]],
) -> None:
    """Have the engine load tensors; live tensors keep their places whatever the engine does.

    Args:
        model: Not in use meanwhile.
        method: One of the engine's.
        layers: The layers that the tensors are loaded into; any where empty.
        weights: Whole groups. Loaders edit what they are given.

    Raises:
        TensorMismatchError: The engine made other tensors than it had.
        Exception: Whatever the engine raises. Modules hold what they held; bits may have changed.
    """
    scope = layers if method == "repacked" else ()  # loaders and reloads may replace any tensor
    with restoring(modules_in(model, scope)) as members, torch.no_grad():
        _load(model, method, layers, weights)
        members.settle()


def _load(
    model: EngineModel,
    method: LoadMethod,
    layers: frozenset[str],
    weights: Iterable[tuple[str, Tensor]],
) -> None:
    if method == "loaded":
        model.load(weights)
    elif method == "reloaded":
        model.reload(weights)
    else:
        model.repack(layers, weights)


def modules_in(model: EngineModel, layers: Collection[str]) -> list[nn.Module]:
    """The modules that layers consist of; all where none is named."""
    return [
        module
        for name, module in model.modules().items()
        if not layers or any(name == layer or name.startswith(f"{layer}.") for layer in layers)
    ]
