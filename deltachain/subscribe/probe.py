"""What the layers of an engine compute from, tried out; and layers put back as they were.

Both engines build their layers alike: a module with a ``weight``, and beside it a ``quant_method``
that multiplies by it, by a packed copy of it, or by whatever else it made of it after loading.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deltachain.subscribe.recorder import Load

logger = logging.getLogger(__name__)


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
    except Exception:  # noqa: BLE001 - a layer that can not be tried is not believed
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
    load: Load, names: Mapping[str, Tensor], owner: Mapping[int, str]
) -> dict[str, frozenset[str]]:
    """The layers that each checkpoint tensor is loaded into. No tensor with an owner is written.

    Args:
        load: The engine's loader.
        names: Meta tensors in the checkpoint's shapes and dtypes, by name.
        owner: The layer that each storage of the model belongs to.
    """
    found: dict[str, set[str]] = defaultdict(set)
    sources = {_storage(tensor): name for name, tensor in names.items()}
    for group in ([list(names)], [[name] for name in names]):
        for batch in group:
            left = [name for name in batch if name not in found]
            if not left:
                continue
            with _Watch(owner, sources, left[0] if len(left) == 1 else "", found):
                _try_load(load, [(name, names[name]) for name in left])
    return {name: frozenset(layers) for name, layers in found.items()}


class _Watch(TorchDispatchMode):
    """Notes into which layer each meta tensor is copied; nothing of the model is written."""

    def __init__(
        self,
        owner: Mapping[int, str],
        sources: Mapping[int, str],
        only: str,
        found: dict[str, set[str]],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner, self.sources, self.only, self.found = owner, sources, only, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Note a copy; let it through where there is nothing to overwrite."""
        del types
        writes = func._schema.is_mutable and args and isinstance(args[0], Tensor)
        layer = self.owner.get(_storage(args[0])) if writes else None
        if func is torch.ops.aten.copy_.default:
            name = self.only or self.sources.get(_storage(args[1]), "")
            if layer is not None and name:
                self.found[name].add(layer)
            if not args[0].is_meta and args[1].is_meta:
                return args[0]
        if layer is not None and not args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def _try_load(load: Load, tensors: list[tuple[str, Tensor]]) -> None:
    """Load what can be loaded; a tensor that can not is in no layer, and will be refused."""
    try:
        with torch.no_grad():
            load(tensors)
    except Exception as exc:  # noqa: BLE001 - whatever a loader raises is its answer
        logger.debug("no layer for %d tensors: %s", len(tensors), exc)


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


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
