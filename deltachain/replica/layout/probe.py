"""What the layers of an engine compute from, tried out; and layers put back as they were.

Both engines build their layers alike: a module with a ``weight``, and beside it a ``quant_method``
that multiplies by it, by a packed copy of it, or by whatever else it made of it after loading.
"""

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
"""The layers that hold an element of a tensor; none for a tensor of nobody."""


def output_of(layer: Any) -> Tensor | None:  # noqa: ANN401 - a layer of an engine
    """What a linear layer computes from a fixed row; ``None`` where it takes no such row."""
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
    """Layers that have, or are part of one that has, something to do after loading."""

    def acts(thing: object) -> bool:
        return hasattr(thing, "process_weights_after_loading")

    return frozenset(
        part
        for name, layer in model.named_modules()
        if acts(layer) or acts(getattr(layer, "quant_method", None))
        for part, _ in layer.named_modules(prefix=name)
    )


def layers_of(
    load: Load,
    names: Mapping[str, Tensor],
    owners: Owners,
    modules: Mapping[str, nn.Module] | None = None,
) -> dict[str, frozenset[str]]:
    """The layers that each checkpoint tensor is loaded into. No tensor with an owner is written.

    Args:
        load: The engine's loader.
        names: Meta tensors in the checkpoint's shapes and dtypes, by name.
        owners: The layers that hold an element of a tensor.
        modules: Of the model, by name: those that a loader may give tensors of its own making,
            which nobody owned before. They keep these.
    """
    found: dict[str, set[str]] = defaultdict(set)
    if not _try_load(load, names, owners, modules or {}, found):
        for name in [name for name in names if name not in found]:
            _try_load(load, {name: names[name]}, owners, modules or {}, found)
    return {name: frozenset(layers) for name, layers in found.items()}


class _Watch(TorchDispatchMode):
    """Notes into which layer each meta tensor is copied; nothing of the model is written."""

    def __init__(
        self, inputs: Mapping[str, Tensor], owners: Owners, found: dict[str, set[str]]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.provenance = Provenance(inputs)
        self.owners, self.found = owners, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Note a write; let it through where there is nothing to overwrite."""
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
        """Note the layers that hold by now what was made of meta tensors."""
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
    """Load what can be loaded, and say whether all could; a tensor that cannot is in no layer."""
    try:
        with torch.no_grad(), _Watch(inputs, owners, found) as watch:
            load(list(inputs.items()))
        watch.look(modules)
    except Exception as exc:  # noqa: BLE001 - whatever a loader raises is its answer
        logger.debug("no layer for %d tensors: %s", len(inputs), exc)
        return False
    return True
