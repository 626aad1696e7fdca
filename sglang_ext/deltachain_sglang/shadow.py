"""A second model without memory, in which single layers are loaded from nothing.

SGLang packs layers in place, and most of that cannot be reversed. The second model is of the same
kind and on the meta device, as SGLang creates one before loading. Layers are given memory there,
SGLang itself loads and packs them, and the results are copied into the live model, whose tensors
and attributes are never replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from deltachain.errors import TensorMismatchError
from deltachain.replica.layout.loaded_layers import layers_of
from deltachain.replica.layout.members import Members, tensors_in
from deltachain.replica.layout.memory_index import MemoryIndex
from deltachain_sglang import loading

NamedTensors: TypeAlias = Iterable[tuple[str, Tensor]]
Modules: TypeAlias = Mapping[str, nn.Module]
Made: TypeAlias = list[tuple[str, str, Tensor]]
"""Tensors with memory: module, path in it, tensor."""


class Shadow:
    """The second model.

    Args:
        raw: Model on the meta device, as SGLang creates it before loading.
        live: Model in service.
        dtype: Dtype of activations.
        device: Device of the live model.
    """

    def __init__(
        self, raw: nn.Module, live: nn.Module, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._raw, self._dtype, self._device = raw, dtype, device
        self._modules: Modules = dict(raw.named_modules())
        self._live: Modules = dict(live.named_modules())
        held = [(n, path, t) for n, m in self._modules.items() for path, t in tensors_in(m)]
        self._holders = MemoryIndex((name, tensor) for name, _, tensor in held)
        self._paths = MemoryIndex((f"{name}.{path}", tensor) for name, path, tensor in held)
        self._owner = {f"{name}.{path}": name for name, path, _ in held}
        self._gone = {name: self._nearest(name) for name in self._modules.keys() - self._live}
        self._filled: set[str] = set()
        self._edited: set[str] = set()

    def layers(self, names: Mapping[str, Tensor]) -> Mapping[str, frozenset[str]]:
        """Return the live layers that each checkpoint tensor is loaded into, tied ones included.

        A layer that SGLang drops after loading is replaced by its parent.

        Args:
            names: Meta tensors in the checkpoint's shapes and dtypes, by name.
        """
        members = {name: Members([module]) for name, module in self._modules.items()}
        try:
            found = layers_of(self._load, names, self._paths.overlapping)
            self._edited |= {name for name, one in members.items() if one.have_changed()}
        finally:
            for one in members.values():
                one.put_back()
        self._filled.update(*found.values())
        owners = {name: {self._owner[path] for path in paths} for name, paths in found.items()}
        return {
            name: frozenset(self._gone.get(layer, layer) for layer in layers)
            for name, layers in owners.items()
        }

    def repack(self, layers: frozenset[str], tensors: NamedTensors) -> None:
        """Load layers from nothing, pack them, and copy the results into the live model.

        Args:
            layers: Names of the layers.
            tensors: All tensors that are loaded into them.

        Raises:
            TensorMismatchError: The results do not have the form of the live tensors.
        """
        with self._loaded(layers, tensors) as made:
            for live, tensor in [self._pair(*one) for one in made]:
                live.copy_(tensor)

    @contextmanager
    def loaded_apart(
        self, layers: frozenset[str], tensors: NamedTensors
    ) -> Iterator[Mapping[str, nn.Module]]:
        """Load layers from nothing and pack them, for as long as this is open.

        Args:
            layers: Names of the layers.
            tensors: All tensors that are loaded into them.

        Yields:
            The modules with the results, by the names of those of the live model.
        """
        with self._loaded(layers, tensors) as made:
            yield {name: self._modules[name] for name, _, _ in made if name in self._live}

    @contextmanager
    def _loaded(self, layers: frozenset[str], tensors: NamedTensors) -> Iterator[Made]:
        """Load layers from nothing and pack them; yield the results, and drop them at the end."""
        wanted = layers | {name for name, holder in self._gone.items() if holder in layers}
        scope = self._scope(wanted)
        members = Members(scope.values())
        before = {id(tensor) for _, _, tensor in _real(scope)}
        try:
            with torch.no_grad():
                self._give_memory(wanted, scope)
                self._load(tensors)
                kept = {id(module) for module in self._raw.modules()}
                left = {name: module for name, module in scope.items() if id(module) in kept}
                loaded = {name for name, _, tensor in _real(left) if id(tensor) not in before}
                loading.process([left[name] for name in left if name in loaded], self._device)
                yield [one for one in _real(left) if id(one[2]) not in before]
        finally:
            members.put_back()

    def _nearest(self, name: str) -> str:
        """Return the nearest live module around a module, or itself."""
        while name and name not in self._live:
            name = name.rpartition(".")[0]
        return name

    def _load(self, tensors: NamedTensors) -> None:
        with loading.in_dtype(self._dtype):
            loading.load(self._raw, tensors, self._device)

    def _scope(self, layers: frozenset[str]) -> Modules:
        """Return the modules that loading some layers may change.

        These are the blocks of the layers, the parents of the blocks, modules that share a tensor,
        and modules that every load edits.
        """
        blocks = {_block(name) for name in layers}
        tied = self._holders.tied(layers) | self._edited
        return {
            name: module
            for name, module in self._modules.items()
            if name in tied
            or _block(name) in blocks
            or any(not name or block.startswith(f"{name}.") for block in blocks)
        }

    def _give_memory(self, layers: frozenset[str], scope: Modules) -> None:
        """Replace the tensors of layers by tensors with memory, in all places that hold them."""
        given: dict[int, Tensor] = {}
        for name in layers & scope.keys():
            for path, tensor in tensors_in(scope[name]):
                if tensor.is_meta and id(tensor) not in given:
                    given[id(tensor)] = self._with_memory(name, path, tensor)
        for module in scope.values():
            members: list[dict[str, Any]] = [module._parameters, module._buffers, vars(module)]
            for held in members:
                held.update({key: given[id(one)] for key, one in held.items() if id(one) in given})

    def _with_memory(self, name: str, path: str, raw: Tensor) -> Tensor:
        """Return a tensor of the same kind with memory, its loader included.

        Tensors to load into are zeros. All others were created with the model, and are copied from
        the live one.
        """
        made = _zeros_like(raw, self._device)
        live = self._live_tensor(name, path)
        if f"{name}.{path}" not in self._filled and live is not None and _form(live) == _form(made):
            made.data.copy_(live)
        return made

    def _live_tensor(self, name: str, path: str) -> Tensor | None:
        return dict(tensors_in(self._live[name])).get(path) if name in self._live else None

    def _pair(self, name: str, path: str, made: Tensor) -> tuple[Tensor, Tensor]:
        live = self._live_tensor(name, path)
        if live is None or _form(live) != _form(made):
            found = "nothing" if live is None else f"{live.dtype}{tuple(live.shape)}"
            raise TensorMismatchError(
                f"SGLang makes {name}.{path} as {made.dtype}{tuple(made.shape)}; {found} lives",
                tensor=f"{name}.{path}",
            )
        return live.data, made.data


def _real(scope: Modules) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the tensors with memory in some modules: module, path in it, tensor."""
    for name, module in scope.items():
        for path, tensor in tensors_in(module):
            if not tensor.is_meta and tensor.numel():
                yield name, path, tensor


def _zeros_like(raw: Tensor, device: torch.device) -> Tensor:
    """Return zeros with all other attributes of a tensor."""
    made: Any = torch.empty_strided(raw.shape, raw.stride(), dtype=raw.dtype, device=device).zero_()
    made.__class__ = raw.__class__
    made.__dict__ = dict(vars(raw))
    found: Tensor = made
    return found


def _form(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def _block(name: str) -> str:
    """Return the numbered block of a module; the module itself if there is none."""
    parts = name.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: number + 1])
