"""Methods by which an engine loads tensors again; live tensors keep their memory."""

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
"""Methods that load whole layers again, in the order in which they are tried."""


@dataclass(frozen=True, slots=True)
class LoadGroup:
    """Checkpoint tensors that are loaded together or not at all.

    Attributes:
        names: Names of the tensors, in the order of the chain.
        layers: Layers that they are loaded into, and layers that share live elements with these;
            empty if unknown.
    """

    names: tuple[str, ...]
    layers: frozenset[str]


def load_with(
    model: EngineModel,
    method: LoadMethod,
    layers: frozenset[str],
    weights: Iterable[tuple[str, Tensor]],
) -> None:
    """Have the engine load tensors; live tensors keep their memory even if it replaces them.

    Args:
        model: The rank's model; not in use meanwhile.
        method: Load method of the engine.
        layers: Layers that the tensors are loaded into; empty for any.
        weights: Tensors of whole groups, by checkpoint name; loaders may edit them.

    Raises:
        TensorMismatchError: The new tensors of the engine do not match the old ones.
        Exception: Any error of the engine. The modules are restored, but bits may have changed.
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
    """Return the modules of some layers; all modules if no layer is given."""
    return [
        module
        for name, module in model.modules().items()
        if not layers or any(name == layer or name.startswith(f"{layer}.") for layer in layers)
    ]
