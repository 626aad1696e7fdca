"""Adapter of one SGLang rank's model to deltachain's interface."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from deltachain.errors import EngineVersionError, TensorMismatchError
from deltachain.replica.layout.heads import DraftOnly, WithHeads
from deltachain.replica.layout.load_recorder import live_tensors
from deltachain.replica.layout.loaded_checkpoint import layers_of
from deltachain.replica.layout.model_state import fixed_rows, is_plain, layer_of, processed
from deltachain.replica.layout.module_members import Members, MemoryIndex, dressed, tensors_in
from deltachain.replica.layout.runtime_tables import made_by_running

from . import compat, loading

# SGLang packs layers in place, and most of that cannot be reversed. The second model is of the same
# kind and on the meta device, as SGLang creates one before loading. Layers are given memory there,
# SGLang itself loads and packs them, and the results are copied into the live model, whose tensors
# and attributes are never replaced.


NamedTensors: TypeAlias = Iterable[tuple[str, Tensor]]
Modules: TypeAlias = Mapping[str, nn.Module]
Made: TypeAlias = list[tuple[str, str, Tensor]]  # tensors with memory: module, path in it, tensor


class Shadow:
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
        gone = self._modules.keys() - self._live
        self._gone = {name: layer_of(name, self._live) for name in gone}
        self._filled: set[str] = set()
        self._edited: set[str] = set()

    def layers(self, names: Mapping[str, Tensor]) -> Mapping[str, frozenset[str]]:
        """Return the live layers that each checkpoint tensor is loaded into, tied ones included.

        A layer that SGLang drops after loading is replaced by its parent.
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
        """Load layers from nothing, pack them, and copy the results into the live model."""
        with self._loaded(layers, tensors) as made:
            for live, tensor in [self._pair(*one) for one in made]:
                live.copy_(tensor)

    @contextmanager
    def loaded_apart(
        self, layers: frozenset[str], tensors: NamedTensors
    ) -> Iterator[Mapping[str, nn.Module]]:
        """Load layers from nothing and pack them, for as long as this is open.

        The modules with the results have the names of those of the live model.
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
        sizes = raw.shape, raw.stride()
        zeros = torch.empty_strided(*sizes, dtype=raw.dtype, device=self._device).zero_()
        made: Tensor = dressed(zeros, raw)
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
    for name, module in scope.items():
        for path, tensor in tensors_in(module):
            if not tensor.is_meta and tensor.numel():
                yield name, path, tensor


def _form(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def _block(name: str) -> str:
    """Return the numbered block of a module; the module itself if there is none."""
    parts = name.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: number + 1])


def computed(layer: Any, dtype: torch.dtype, seed: int | None = None) -> Tensor | None:
    """Return the output of a linear layer, a head or experts; ``None`` if it cannot be run.

    With a seed, outputs for several rows.
    """
    kind = type(layer)
    try:
        with torch.no_grad():
            if issubclass(kind, loading.experts()):
                return _of_experts(layer, dtype)
            if issubclass(kind, loading.heads()):
                return loading.logits(layer, _rows(layer, layer.embedding_dim, dtype, seed))
            if issubclass(kind, loading.linears()):
                width = getattr(layer, "input_size_per_partition", layer.input_size)
                rows, bias = _rows(layer, width, dtype, seed), getattr(layer, "bias", None)
                output: Tensor = layer.quant_method.apply(layer, rows, bias)
                return output.float()
    except Exception as exc:  # noqa: BLE001 - then only its tensors are compared
        logger.debug("%s cannot be tried: %s", type(layer).__name__, exc)
    return None


def _of_experts(layer: Any, dtype: torch.dtype) -> Tensor | None:
    """Return outputs for one row per expert of this rank, regardless of the router's choice."""
    count = layer.num_experts
    if layer.moe_ep_size > 1:
        if not loading.numbers_local_experts(layer):
            return None  # only its dispatcher, which calls other ranks, knows those of this rank
        count = layer.num_local_experts
    rows = _rows(layer, layer.hidden_size, dtype, count=count)
    return loading.of_experts(layer, rows).float()


def _rows(
    layer: nn.Module, width: int, dtype: torch.dtype, seed: int | None = None, count: int = 1
) -> Tensor:
    return fixed_rows(count, width, dtype, next(layer.parameters()).device, seed)


logger = logging.getLogger(__name__)


class SglangModel:
    """A rank's model as an ``EngineModel``, with the ``heads`` of its checkpoint that draft for it.

    ``heads`` is their ``ModelRunner``, as SGLang names it; nothing is loaded into other drafts.
    """

    def __init__(self, model: nn.Module, config: Any, device: str, heads: Any = None) -> None:
        compat.check_experts()
        self._loaded = {"": model} | ({"draft.": heads.model} if heads else {})
        for one in self._loaded.values():
            loading.guard(one)
        self.model = WithHeads(model, heads.model) if heads else model
        self._heads, self._config = heads, config
        self._device = torch.device(device)
        self._known: dict[str, frozenset[str]] = {}
        self._slots = self.slots()  # while these layers are known
        self.checkpoint = loading.checkpoint(config)

    def modules(self) -> Mapping[str, nn.Module]:
        return dict(self.model.named_modules())

    def tensors(self) -> Mapping[str, Tensor]:
        return live_tensors(self.model)

    def slots(self) -> Mapping[str, tuple[int, ...]]:
        return loading.slots(self.modules())

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        with loading.in_dtype(self._config.dtype):
            loading.load(self.model, tensors, self._device)

    def reload(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Unpack the layers of these tensors where possible, load, and pack these layers again."""
        if not loading.is_reloadable(self.model):
            raise EngineVersionError("SGLang quantises this model anew whenever it loads it")
        modules, unpacked = self.modules(), set[str]()

        def passed() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                layers = self._layers_of(name, tensor) - unpacked
                loading.restore([modules[layer] for layer in layers], self._device)
                unpacked.update(layers)
                yield name, tensor

        self.load(passed())
        with loading.in_dtype(self._config.dtype):
            loading.process([modules[n] for n in modules if n in unpacked], self._device)

    def repack(self, layers: frozenset[str], tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self._shadow is None:
            raise EngineVersionError(f"SGLang makes no {type(self.model).__name__} without memory")
        self._shadow.repack(layers, tensors)

    @contextmanager
    def loaded_apart(
        self, layers: frozenset[str], tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[Mapping[str, nn.Module]]:
        """Load and pack layers in a second model, if any of them is quantised."""
        modules = self.modules()
        if not any(loading.is_quantised(modules[name]) for name in layers & modules.keys()):
            yield {}
            return
        if self._shadow is None:
            raise EngineVersionError(f"SGLang makes no {type(self.model).__name__} without memory")
        with self._shadow.loaded_apart(layers, tensors) as found:
            yield found

    def probe(self, layer: nn.Module, seed: int) -> Tensor | None:
        return computed(layer, self._config.dtype, seed)

    def layers(self, names: Mapping[str, Tensor]) -> Mapping[str, frozenset[str]]:
        """Find layers by loading meta tensors into an unpacked second model, or else this one."""
        if (slots := self.slots()) != self._slots:
            self._slots, self._known = slots, {}
        if not names.keys() <= self._known.keys():
            held = [(n, t) for n, one in self.modules().items() for _, t in tensors_in(one)]
            found = (
                self._shadow.layers(names)
                if self._shadow
                else layers_of(self.load, names, MemoryIndex(held).overlapping)
            )
            self._known.update({name: found.get(name, frozenset()) for name in names})
        return {name: self._known[name] for name in names if self._known[name]}

    def processed(self) -> frozenset[str]:
        return processed(self.model)

    def made_by_running(self) -> frozenset[str]:
        loaded = self._loaded.items()
        return frozenset(prefix + name for prefix, one in loaded for name in made_by_running(one))

    def is_plain(self, layer: str) -> bool:
        found = self.model.get_submodule(layer)
        with torch.no_grad():
            return isinstance(found, loading.linears()) and is_plain(found)

    def compute(self, layers: frozenset[str]) -> Mapping[str, Tensor]:
        dtype = self._config.dtype
        found = {
            name: computed(layer, dtype) for name, layer in self.modules().items() if name in layers
        }
        return {name: output for name, output in found.items() if output is not None}

    def _layers_of(self, name: str, tensor: Tensor) -> frozenset[str]:
        if name not in self._known:
            self.layers({name: tensor.to("meta")})
        return self._known[name] & self.modules().keys()

    @cached_property
    def _shadow(self) -> Shadow | None:
        try:
            raw = loading.raw(self._config)
            if isinstance(self.model, WithHeads):
                raw = WithHeads(raw, loading.raw(self._heads.model_config), self.model)
            elif isinstance(self.model, DraftOnly):
                raw = DraftOnly(raw, self.model, self.model)
        except Exception as exc:  # noqa: BLE001 - any model of SGLang may need memory in construction
            logger.info("SGLang makes no %s without memory: %s", type(self.model).__name__, exc)
            return None
        return Shadow(raw, self.model, self._config.dtype, self._device)
