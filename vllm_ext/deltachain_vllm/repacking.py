"""Repacking of layers: reset them to before packing, load them, and pack them again.

vLLM records how every layer was created (``reload/layerwise.py``). Only this record and vLLM's own
methods are used here: raw tensors are created as recorded, the model's loader fills them, and
post-load processing runs again, from the state in which it ran first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from deltachain.replica.layout.members import Members
from deltachain_vllm.compat import (
    UNRECORDED,
    acts_last,
    as_before_processing,
    layerwise,
    left_alone,
    own_loader,
    process,
    raw_dtype,
)

Member: TypeAlias = tuple[nn.Module, str]
"""A module, and the name of one of its own parameters."""


def repack(
    model: nn.Module, layers: Iterable[str], load: Callable[[], object], dtype: torch.dtype
) -> None:
    """Load into raw layers and pack them; new tensors then take the places of the old ones.

    Args:
        model: Model of the worker; not in use meanwhile.
        layers: Names of the layers. Others that share a parameter with one of them are packed again
            as well, and so are tensors made from theirs; such layers keep their tensors.
        load: Function that calls the model's own loader.
        dtype: Dtype of activations.
    """
    every = list(model.modules())
    chosen = {model.get_submodule(name) for name in layers}
    last = _last(every, chosen)
    raw = [one for one in every if one in chosen and one not in last]
    tied = _ties(every, raw)
    views = [view for one in every for view in _views(one, chosen)]
    aliases = {one: dict(one._buffers) for one in raw}
    beside = Members(affected(model, chosen) - chosen)
    for layer in raw:
        _make_raw(layer)
    for (layer, name), (first, called) in tied.items():
        layer._parameters[name] = first._parameters[called]
    for view in views:
        view.make()
    scaled = [one for one in last if one in chosen]
    for layer in scaled:
        _make_scales(layer)
    load()
    packed = chosen.union(layer for layer, _ in tied).difference(last)
    _process([one for one in every if one in packed])
    for layer, buffers in aliases.items():
        _put_aliases_back(layer, buffers)
    _process(scaled)
    for layer in last:
        layer.process_weights_after_loading(dtype)  # type: ignore[operator]
    beside.settle()


def affected(model: nn.Module, chosen: set[nn.Module]) -> set[nn.Module]:
    """Return all layers that a repack of some layers changes."""
    every = list(model.modules())
    last = _last(every, chosen)
    tied = _ties(every, [one for one in every if one in chosen and one not in last])
    holders = [view.holder for one in every for view in _views(one, chosen)]
    return chosen.union((layer for layer, _ in tied), holders, last)


def _last(every: Iterable[nn.Module], chosen: set[nn.Module]) -> list[nn.Module]:
    """Return the layers processed after all others that are, or contain, a chosen one."""
    return [one for one in every if acts_last(one) and not chosen.isdisjoint(one.modules())]


def _process(layers: Iterable[nn.Module]) -> None:
    for layer in layers:
        with as_before_processing(layer):
            process(layer)


def _ties(every: Iterable[nn.Module], raw: list[nn.Module]) -> dict[Member, Member]:
    """Return parameters that share elements with a new one, each with that new one."""
    first = {_at(p): (layer, n) for layer in reversed(raw) for n, p in reversed(_recorded(layer))}
    first.pop(0, None)
    return {
        (layer, name): first[_at(parameter)]
        for layer in every
        for name, parameter in _recorded(layer)
        if first.get(_at(parameter), (layer, name)) != (layer, name)
    }


def _recorded(layer: nn.Module) -> list[tuple[str, nn.Parameter | None]]:
    return [(n, p) for n, p in layer._parameters.items() if n not in left_alone()]


def _at(tensor: Tensor | None) -> int:
    """Return the address of a tensor's elements; 0 if there are none."""
    return tensor.data_ptr() if tensor is not None and tensor.numel() and not tensor.is_meta else 0


@dataclass(frozen=True, slots=True)
class _View:
    """A buffer created as a view of a parameter of the same module or of a submodule."""

    holder: nn.Module
    name: str
    owner: nn.Module
    parameter: str
    shape: torch.Size

    def make(self) -> None:
        """Make it a view of the present parameter."""
        raw = self.owner.get_parameter(self.parameter)
        self.holder.register_buffer(self.name, raw.data.view(self.shape), persistent=False)


def _views(holder: nn.Module, chosen: set[nn.Module]) -> Iterator[_View]:
    """Yield unrecorded buffers of a module, which view a parameter of a chosen one."""
    recorded = layerwise().get_layerwise_info(holder).restore_metadata[1]
    for name in holder._non_persistent_buffers_set - recorded.keys() - left_alone():
        buffer = holder._buffers.get(name)
        if buffer is None:
            continue
        found = [
            _View(holder, name, owner, parameter, buffer.shape)
            for owner in holder.modules()
            for parameter, raw in layerwise().get_layerwise_info(owner).restore_metadata[0].items()
            if raw.squeeze().shape == buffer.squeeze().shape
        ]
        if len(found) == 1 and found[0].owner in chosen:
            yield found[0]


def _make_raw(layer: nn.Module) -> None:
    """Give a layer its original tensors, all zeros except buffers and its bias."""
    reload = layerwise()
    info = reload.get_layerwise_info(layer)
    buffers = dict(layer._buffers)
    reload.restore_layer_on_meta(layer, info)
    on_meta = [name for name, t in reload.get_layer_tensors(layer).items() if t.is_meta]
    reload.materialize_layer(layer, info)
    for name in on_meta:
        raw, before = getattr(layer, name), buffers.get(name)
        own_loader(raw)
        if before is not None and (before.shape, before.dtype) == (raw.shape, raw.dtype):
            raw.data.copy_(before)
        else:
            raw.data.zero_()
    for name in UNRECORDED & layer._parameters.keys():
        parameter = layer._parameters[name]
        if parameter is not None:
            layer._parameters[name] = _copy(parameter, raw_dtype(layer, parameter))


def _copy(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Copy a parameter's numbers and all its attributes, its loader included."""
    raw: Any = parameter.data.to(dtype, copy=True)
    raw.__class__ = parameter.__class__
    raw.__dict__ = parameter.__dict__.copy()
    own_loader(raw)
    found: nn.Parameter = raw
    return found


def _make_scales(layer: nn.Module) -> None:
    """Give an attention layer its parameters for key and value scales, as a reload does."""
    method = getattr(layer, "quant_method", None)
    if method is not None:
        method.create_weights(layer)


def _put_aliases_back(layer: nn.Module, buffers: Mapping[str, Tensor | None]) -> None:
    """Restore a layer's views, which are not recorded and so were not created."""
    for name, buffer in buffers.items():
        if name not in layer._buffers and not hasattr(layer, name):
            layer.register_buffer(name, buffer, persistent=False)
