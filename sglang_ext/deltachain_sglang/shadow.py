"""A second model without memory, in which single layers are loaded from nothing.

SGLang packs layers where they lie, and has no way back from most of what it does there. The second
model is of the same kind and on the meta device, as SGLang makes one before it loads it. Layers are
given memory there, SGLang itself loads and packs them, and what results is copied into the live
model, none of whose tensors or attributes is ever replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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


class Shadow:
    """The second model.

    Args:
        raw: On the meta device, as SGLang makes a model before it loads it.
        live: The model that is served.
        dtype: Of activations.
        device: Where the live model was loaded to.
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
        """The live layers that each checkpoint tensor is loaded into, those with ties included.

        Of a layer that SGLang drops once it is loaded, it is the one that had it.

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
        """Load layers from nothing, pack them, and copy what comes of it into the live model.

        Args:
            layers: By name.
            tensors: All that are loaded into them.

        Raises:
            TensorMismatchError: What comes of it is not of the form of what lives.
        """
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
                made = [one for one in _real(left) if id(one[2]) not in before]
                for live, tensor in [self._pair(*one) for one in made]:
                    live.copy_(tensor)
        finally:
            members.put_back()

    def _nearest(self, name: str) -> str:
        """The nearest module around one that lives."""
        while name and name not in self._live:
            name = name.rpartition(".")[0]
        return name

    def _load(self, tensors: NamedTensors) -> None:
        with loading.in_dtype(self._dtype):
            loading.load(self._raw, tensors, self._device)

    def _scope(self, layers: frozenset[str]) -> Modules:
        """Modules that loading some layers may change.

        These are the blocks that the layers are in, what those are in, who shares a tensor, and
        those that any load edits.
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
        """Replace the tensors of layers by some that have memory, wherever they are held."""
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
        """A tensor of the same kind, its loader included.

        What something is loaded into is zeros. What nothing is loaded into was made with the model,
        and is taken from the live one.
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
    """The tensors with memory that some modules hold: module, path in it, tensor."""
    for name, module in scope.items():
        for path, tensor in tensors_in(module):
            if not tensor.is_meta and tensor.numel():
                yield name, path, tensor


def _zeros_like(raw: Tensor, device: torch.device) -> Tensor:
    """Zeros with everything else that a tensor has."""
    made: Any = torch.empty_strided(raw.shape, raw.stride(), dtype=raw.dtype, device=device).zero_()
    made.__class__ = raw.__class__
    made.__dict__ = dict(vars(raw))
    found: Tensor = made
    return found


def _form(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def _block(name: str) -> str:
    """The numbered block that a module is in; itself where it is in none."""
    parts = name.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: number + 1])
