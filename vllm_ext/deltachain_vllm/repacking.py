"""Repacking of layers: reset them to before packing, load them, and pack them again.

vLLM records how every layer was created (``reload/layerwise.py``). Only this record and vLLM's own
methods are used here: raw tensors are created as recorded, the model's loader fills them, and
post-load processing runs again, from the state in which it ran first.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType, MethodType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from deltachain.replica.layout.module_members import ACTS, NESTED, Members, container_of, dressed

from . import compat

Member: TypeAlias = tuple[nn.Module, str]  # a module, and the name of one of its own parameters


def repack(
    model: nn.Module, layers: Iterable[str], load: Callable[[], object], dtype: torch.dtype
) -> None:
    """Load into raw layers and pack them; new tensors then take the places of the old ones.

    Layers that share a parameter with one of these are packed again as well, and so are tensors
    made from theirs; such layers keep their tensors. ``dtype`` is that of activations.
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
        shared = {n: of for (one, n), of in tied.items() if one is layer and of[0] is not layer}
        _make_raw(layer, {n: first._parameters[called] for n, (first, called) in shared.items()})
    for (layer, name), (first, called) in tied.items():
        layer._parameters[name] = first._parameters[called]
    for view in views:
        view.make()
    scaled = [one for one in last if one in chosen]
    for layer in scaled:  # key and value scales of attention, as a reload makes them
        method = getattr(layer, "quant_method", None)
        if method is not None:
            method.create_weights(layer)
    load()
    packed = chosen.union(layer for layer, _ in tied).difference(last)
    _process(
        [one for one in every if one in packed], {one: of for (one, _), (of, _) in tied.items()}
    )
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
    return [one for one in every if compat.acts_last(one) and not chosen.isdisjoint(one.modules())]


def _process(
    layers: Iterable[nn.Module], tied: Mapping[nn.Module, nn.Module] = MappingProxyType({})
) -> None:
    for layer in layers:
        if layer in tied and compat.computes_alike(layer, tied[layer]):
            continue
        with compat.as_before_processing(layer):
            compat.process(layer)


def _ties(every: Iterable[nn.Module], raw: list[nn.Module]) -> dict[Member, Member]:
    """Return parameters that share elements with a new one, each with that new one."""
    held = [(layer, n, p) for layer in raw for n, p in _recorded(layer)]
    first = {address_of(p): (layer, n) for layer, n, p in reversed(held)}
    first.pop(0, None)
    return {
        (layer, name): first[address_of(parameter)]
        for layer in every
        for name, parameter in _recorded(layer)
        if first.get(address_of(parameter), (layer, name)) != (layer, name)
    }


def _recorded(layer: nn.Module) -> list[tuple[str, nn.Parameter | None]]:
    return [(n, p) for n, p in layer._parameters.items() if n not in compat.left_alone()]


def address_of(tensor: Tensor | None) -> int:
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
        raw = self.owner.get_parameter(self.parameter)
        self.holder.register_buffer(self.name, raw.data.view(self.shape), persistent=False)


def _views(holder: nn.Module, chosen: set[nn.Module]) -> Iterator[_View]:
    """Yield unrecorded buffers of a module, which view a parameter of a chosen one."""
    infos = compat.layerwise().get_layerwise_info
    recorded = infos(holder).restore_metadata[1]
    for name in holder._non_persistent_buffers_set - recorded.keys() - compat.left_alone():
        buffer = holder._buffers.get(name)
        if buffer is None:
            continue
        found = [
            _View(holder, name, owner, parameter, buffer.shape)
            for owner in holder.modules()
            for parameter, raw in infos(owner).restore_metadata[0].items()
            if raw.squeeze().shape == buffer.squeeze().shape
        ]
        if len(found) == 1 and found[0].owner in chosen:
            yield found[0]


def _make_raw(layer: nn.Module, shared: Mapping[str, nn.Parameter | None]) -> None:
    """Give a layer its original tensors, all zeros except buffers, its bias and ``shared`` ones."""
    reload = compat.layerwise()
    info = reload.get_layerwise_info(layer)
    buffers = dict(layer._buffers)
    reload.restore_layer_on_meta(layer, info)
    layer._parameters.update(shared)
    on_meta = [name for name, t in reload.get_layer_tensors(layer).items() if t.is_meta]
    reload.materialize_layer(layer, info)
    for name in on_meta:
        raw, before = getattr(layer, name), buffers.get(name)
        compat.own_loader(raw)
        if before is not None and (before.shape, before.dtype) == (raw.shape, raw.dtype):
            raw.data.copy_(before)
        else:
            raw.data.zero_()
    for name in compat.UNRECORDED & layer._parameters.keys():
        parameter = layer._parameters[name]
        if parameter is not None:
            dtype = compat.raw_dtype(layer, parameter)
            copied = dressed(parameter.data.to(dtype, copy=True), parameter)
            compat.own_loader(copied)
            layer._parameters[name] = copied


def _put_aliases_back(layer: nn.Module, buffers: Mapping[str, Tensor | None]) -> None:
    """Restore a layer's views, which are not recorded and so were not created."""
    for name, buffer in buffers.items():
        if name not in layer._buffers and not hasattr(layer, name):
            layer.register_buffer(name, buffer, persistent=False)


# The model's loader finds layers by their names, so a copy takes the place of its layer while
# weights are loaded and processed. It has tensors of its own, and its own quantisation method and
# kernels: what went wrong with the layer in service, or was left there by an earlier version, is
# not in it.


OWN: Final = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that a copy needs for itself, whatever they contain."""

SHARED: Final = ("kv_cache",)  # parts of the names of members that a copy shares


def loaded_apart(
    model: nn.Module, layers: Iterable[str], load: Callable[[], object], dtype: torch.dtype
) -> Mapping[str, nn.Module]:
    """Load layers into copies, and process these as for the first time; the model is unchanged.

    Returns the copies, by the names of their layers, of all layers that a repack changes; empty if
    no layer is quantised.
    """
    names = list(layers)
    chosen = {model.get_submodule(name) for name in names}
    if not any(compat.is_quantised(layer) for layer in chosen):
        return {}
    scope = affected(model, chosen)
    called = {module: name for name, module in model.named_modules()}
    members, copies = Members(scope), _Copies(scope)
    try:
        with copies.standing_in(model):
            repack(model, names, load, dtype)
    finally:
        members.put_back()
    return {called[layer]: copies.of(layer) for layer in scope}


class _Copies:
    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._copies: dict[int, Any] = {}
        copied = [(layer, copy.copy(layer)) for layer in layers]
        self._copies.update((id(layer), one) for layer, one in copied)
        for layer, one in copied:
            self._separate(layer, one)
            compat.copy_record(layer, one)

    def of(self, layer: nn.Module) -> nn.Module:
        found: nn.Module = self._copies[id(layer)]
        return found

    @contextmanager
    def standing_in(self, model: nn.Module) -> Iterator[None]:
        """Put the copies in the places of their layers, in every module that has these."""
        held = [
            (module._modules, name, child)
            for module in model.modules()
            for name, child in module._modules.items()
            if child is not None and id(child) in self._copies
        ]
        for children, name, child in held:
            children[name] = self.of(child)
        try:
            yield
        finally:
            for children, name, child in held:
                children[name] = child

    def _separate(self, layer: nn.Module, copied: nn.Module) -> None:
        """Give a copy containers of its own, and copies of whatever takes part in processing."""
        own, last = vars(copied), compat.acts_last(layer)
        for key in OWN:
            own[key] = {name: self._copies.get(id(one), one) for name, one in own[key].items()}
        own["_non_persistent_buffers_set"] = set(own["_non_persistent_buffers_set"])
        if last:  # it is not created from its record: processing writes into its tensors
            own["_parameters"] = {n: _cloned(one) for n, one in own["_parameters"].items()}
            own["_buffers"] = {n: _cloned(one) for n, one in own["_buffers"].items()}
        for key, value in own.items():
            if key not in OWN and not _is_shared(key):
                own[key] = self._copied(value, NESTED, follows=last)
        if last:
            compat.forget_scales(copied)

    def _copied(self, value: Any, depth: int, *, follows: bool) -> Any:
        """Return a copy of an object that takes part in processing; other objects themselves."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, MethodType) and id(value.__self__) in self._copies:
            return value.__func__.__get__(self._copies[id(value.__self__)])
        if isinstance(value, Tensor):
            return _cloned(value)
        here = follows or hasattr(type(value), ACTS)
        if depth < 0 or not _is_copied(value, follows=here):
            return value
        made = self._copies[id(value)] = copy.copy(value)
        members = container_of(made)
        for key in range(len(made)) if isinstance(made, list) else list(members):
            if not _is_shared(key):
                members[key] = self._copied(members[key], depth - 1, follows=here)
        return made


def _is_copied(value: Any, *, follows: bool) -> bool:
    """Return whether an object is copied: a container, or one that takes part in processing."""
    if isinstance(value, dict | list):
        return True
    inner = container_of(value)
    return follows and isinstance(inner, dict) and "distributed" not in type(value).__module__


def _is_shared(key: object) -> bool:
    return any(part in str(key) for part in SHARED)


def _cloned(tensor: Tensor | None) -> Any:
    """Return a tensor of the same class with elements and attributes of its own."""
    if tensor is None or tensor.is_meta:
        return tensor
    return dressed(tensor.data.clone(), tensor)
