"""Layers loaded from nothing into copies, which stand in for them in the model meanwhile.

The model's loader finds layers by their names, so a copy takes the place of its layer while weights
are loaded and processed. It has tensors of its own, and its own quantisation method and kernels:
what went wrong with the layer in service, or was left there by an earlier version, is not in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn

from deltachain.replica.layout.members import ACTS, NESTED, Members, container_of
from deltachain_vllm.compat import acts_last, copy_record, forget_scales, is_quantised
from deltachain_vllm.repacking import affected, repack

OWN: Final = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that a copy needs for itself, whatever they contain."""

SHARED: Final = ("kv_cache",)
"""Parts of the names of members that a copy shares."""


def loaded_apart(
    model: nn.Module, layers: Iterable[str], load: Callable[[], object], dtype: torch.dtype
) -> Mapping[str, nn.Module]:
    """Load layers into copies, and process these as for the first time; the model stays as it is.

    Args:
        model: Model of the worker; not in use meanwhile.
        layers: Names of the layers.
        load: Function that calls the model's own loader.
        dtype: Dtype of activations.

    Returns:
        The copies, by the names of their layers, of all layers that a repack changes; empty if no
        layer is quantised.
    """
    names = list(layers)
    chosen = {model.get_submodule(name) for name in names}
    if not any(is_quantised(layer) for layer in chosen):
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
    """Copies of layers, and of the objects that process them.

    Args:
        layers: Layers of the model.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._copies: dict[int, Any] = {}
        copied = [(layer, copy.copy(layer)) for layer in layers]
        self._copies.update((id(layer), one) for layer, one in copied)
        for layer, one in copied:
            self._separate(layer, one)
            copy_record(layer, one)

    def of(self, layer: nn.Module) -> nn.Module:
        """Return the copy of a layer."""
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
        own, last = vars(copied), acts_last(layer)
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
            forget_scales(copied)

    def _copied(self, value: Any, depth: int, *, follows: bool) -> Any:  # noqa: ANN401
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


def _is_copied(value: Any, *, follows: bool) -> bool:  # noqa: ANN401
    """Return whether an object is copied: a container, or one that takes part in processing."""
    if isinstance(value, dict | list):
        return True
    inner = container_of(value)
    return follows and isinstance(inner, dict) and "distributed" not in type(value).__module__


def _is_shared(key: object) -> bool:
    return any(part in str(key) for part in SHARED)


def _cloned(tensor: Tensor | None) -> Any:  # noqa: ANN401 - of a class of vLLM's
    """Return a tensor of the same class with elements and attributes of its own."""
    if tensor is None or tensor.is_meta:
        return tensor
    found: Any = tensor.data.clone()
    found.__class__ = tensor.__class__
    found.__dict__ = dict(vars(tensor))
    return found
