"""Find the layers that each checkpoint tensor is loaded into, by running the loader dry."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from deltachain.replica.layout.members import tensors_in
from deltachain.replica.layout.provenance import Provenance
from deltachain.replica.layout.recorder import Load

logger = logging.getLogger(__name__)

Owners: TypeAlias = Callable[[Tensor], frozenset[str]]
"""Function that returns the layers with an element of a tensor; none outside the model."""


def layers_of(
    load: Load,
    names: Mapping[str, Tensor],
    owners: Owners,
    modules: Mapping[str, nn.Module] | None = None,
) -> dict[str, frozenset[str]]:
    """Find the layers that each checkpoint tensor is loaded into; no owned tensor is written.

    Args:
        load: Loader of the engine.
        names: Meta tensors in the checkpoint's shapes and dtypes, by name.
        owners: Function that returns the layers with an element of a tensor.
        modules: Modules of the model, by name, in which a loader may put new tensors without an
            owner. The new tensors stay there.
    """
    found: dict[str, set[str]] = defaultdict(set)
    if not _try_load(load, names, owners, modules or {}, found):
        for name in [name for name in names if name not in found]:
            _try_load(load, {name: names[name]}, owners, modules or {}, found)
    return {name: frozenset(layers) for name, layers in found.items()}


class _Watch(TorchDispatchMode):
    """Dispatch mode that records the layer of each meta tensor, and writes no live tensor."""

    def __init__(
        self, inputs: Mapping[str, Tensor], owners: Owners, found: dict[str, set[str]]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.provenance = Provenance(inputs)
        self.owners, self.found = owners, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Record a write; execute it only if it overwrites nothing."""
        del types
        sources = self.provenance.sources((args, kwargs))
        writes = func._schema.is_mutable and args and isinstance(args[0], Tensor)
        layers = self.owners(args[0]) if writes else frozenset()
        if layers:
            for name in sources:
                self.found[name] |= layers
        elif writes:
            self.provenance.made(args[0], sources)
        from_meta = func is torch.ops.aten.copy_.default and args[1].is_meta
        if writes and not args[0].is_meta and (from_meta or layers):
            return args[0]
        returned = func(*args, **(kwargs or {}))
        if not layers:
            self.provenance.made(returned, sources)
        return returned

    def look(self, modules: Mapping[str, nn.Module]) -> None:
        """Record the layers with tensors made from meta tensors."""
        for layer, module in modules.items():
            made = [tensor for _, tensor in tensors_in(module) if not is_lazy(tensor)]
            for name in self.provenance.sources(made):
                self.found[name].add(layer)


def _try_load(
    load: Load,
    inputs: Mapping[str, Tensor],
    owners: Owners,
    modules: Mapping[str, nn.Module],
    found: dict[str, set[str]],
) -> bool:
    """Load all tensors; return whether that succeeded. A tensor that fails is in no layer."""
    try:
        with torch.no_grad(), _Watch(inputs, owners, found) as watch:
            load(list(inputs.items()))
        watch.look(modules)
    except Exception as exc:  # noqa: BLE001 - any error of a loader is a result
        logger.debug("no layer for %d tensors: %s", len(inputs), exc)
        return False
    return True
