"""Adapter of one SGLang rank's model to deltachain's interface."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from deltachain.errors import EngineVersionError
from deltachain.replica.layout.layer_probe import is_plain, processed
from deltachain.replica.layout.loaded_layers import layers_of
from deltachain.replica.layout.members import tensors_in
from deltachain.replica.layout.memory_index import MemoryIndex
from deltachain.replica.layout.recorder import live_tensors
from deltachain.replica.layout.runtime_tables import made_by_running
from deltachain_sglang import compat, loading
from deltachain_sglang.computing import computed, probe
from deltachain_sglang.shadow import Shadow

logger = logging.getLogger(__name__)


class SglangModel:
    """A rank's model as :class:`deltachain.replica.engine.EngineModel`.

    Args:
        model: Model as SGLang loaded it.
        config: ``ModelConfig`` of SGLang.
        device: Device of the model.

    Raises:
        EngineVersionError: This SGLang was not tested.
        ConfigError: The model's weights must not be written, or the server moves experts.
    """

    def __init__(self, model: nn.Module, config: Any, device: str) -> None:  # noqa: ANN401
        compat.check_version()
        compat.check_experts()
        loading.guard(model)
        self.model = model
        self._config = config
        self._device = torch.device(device)
        self._known: dict[str, frozenset[str]] = {}
        self.checkpoint = loading.checkpoint(config)

    def modules(self) -> Mapping[str, nn.Module]:
        """Return every module; one with several names only once."""
        return dict(self.model.named_modules())

    def tensors(self) -> Mapping[str, Tensor]:
        """Return every live tensor."""
        return live_tensors(self.model)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Call the model's own ``load_weights``."""
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
        """Load and pack layers in a second model, and copy the results into this one."""
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
        """Return the outputs of a linear layer, a head or experts for several rows."""
        return probe(layer, self._config.dtype, seed)

    def layers(self, names: Mapping[str, Tensor]) -> Mapping[str, frozenset[str]]:
        """Find layers by loading meta tensors into an unpacked second model, or else this one."""
        if not names.keys() <= self._known.keys():
            found = self._shadow.layers(names) if self._shadow else self._layers_here(names)
            self._known.update({name: found.get(name, frozenset()) for name in names})
        return {name: self._known[name] for name in names if self._known[name]}

    def processed(self) -> frozenset[str]:
        """Return the layers with post-load processing."""
        return processed(self.model)

    def made_by_running(self) -> frozenset[str]:
        """Return tables created by running; see :mod:`deltachain.replica.layout.runtime_tables`."""
        return made_by_running(self.model)

    def is_plain(self, layer: str) -> bool:
        """Return whether a layer is plain; only linear layers can be."""
        found = self.model.get_submodule(layer)
        with torch.no_grad():
            return isinstance(found, loading.linears()) and is_plain(found)

    def compute(self, layers: frozenset[str]) -> Mapping[str, Tensor]:
        """Return the outputs of the linear layers, heads and experts among these layers."""
        dtype = self._config.dtype
        found = {
            name: computed(layer, dtype) for name, layer in self.modules().items() if name in layers
        }
        return {name: output for name, output in found.items() if output is not None}

    def _layers_of(self, name: str, tensor: Tensor) -> frozenset[str]:
        if name not in self._known:
            self.layers({name: tensor.to("meta")})
        return self._known[name] & self.modules().keys()

    def _layers_here(self, names: Mapping[str, Tensor]) -> Mapping[str, frozenset[str]]:
        held = [(n, t) for n, module in self.modules().items() for _, t in tensors_in(module)]
        return layers_of(self.load, names, MemoryIndex(held).overlapping)

    @cached_property
    def _shadow(self) -> Shadow | None:
        try:
            raw = loading.raw(self._config)
        except Exception as exc:  # noqa: BLE001 - any model of SGLang may need memory in construction
            logger.info("SGLang makes no %s without memory: %s", type(self.model).__name__, exc)
            return None
        return Shadow(raw, self.model, self._config.dtype, self._device)
