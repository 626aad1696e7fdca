"""One SGLang rank's model, as deltachain asks for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deltachain.errors import EngineVersionError
from deltachain.subscribe.probe import is_plain, layers_of, output_of, processed
from deltachain.subscribe.recorder import live_tensors
from deltachain_sglang import compat, loading


class SglangModel:
    """See :class:`deltachain.subscribe.engine.EngineModel`.

    Args:
        model: As SGLang loaded it.
        config: SGLang's ``ModelConfig``.
        device: Where it was loaded to.

    Raises:
        EngineVersionError: This SGLang was not tested.
        ConfigError: Its weights must not be written.
    """

    def __init__(self, model: nn.Module, config: Any, device: str) -> None:  # noqa: ANN401
        compat.check_version()
        loading.guard(model)
        self.model = model
        self._config = config
        self._device = torch.device(device)
        self.checkpoint = loading.checkpoint(config)

    def modules(self) -> Mapping[str, nn.Module]:
        """Every module of the model."""
        return dict(self.model.named_modules())

    def tensors(self) -> Mapping[str, Tensor]:
        """Every live tensor."""
        return live_tensors(self.model)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> object:
        """The model's own ``load_weights``."""
        with loading.in_dtype(self._config.dtype):
            return self.model.load_weights(tensors)  # type: ignore[operator]

    def reload(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Unpack all layers that can be, load these tensors, and pack again."""
        with loading.in_dtype(self._config.dtype):
            loading.reload(self.model, tensors, self._device)

    def layers(self, names: Mapping[str, Tensor]) -> Mapping[str, frozenset[str]]:
        """Load meta tensors and let nothing through."""
        owner = {
            tensor.untyped_storage()._cdata: name.rpartition(".")[0]
            for name, tensor in self.tensors().items()
        }
        return layers_of(self.load, names, owner)

    def processed(self) -> frozenset[str]:
        """Layers that have something to do after loading."""
        return processed(self.model)

    def is_plain(self, layer: str) -> bool:
        """See :class:`EngineModel`; linear layers alone."""
        found = self.model.get_submodule(layer)
        with torch.no_grad():
            return isinstance(found, loading.linears()) and is_plain(found)

    def compute(self, layers: frozenset[str]) -> Mapping[str, Tensor]:
        """Outputs of the linear layers among these."""
        found = {name: output_of(layer) for name, layer in self._linears() if name in layers}
        return {name: output for name, output in found.items() if output is not None}

    def repack(self, layers: frozenset[str], tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See :class:`EngineModel`."""
        del layers, tensors
        raise EngineVersionError("not yet")

    def _linears(self) -> Iterable[tuple[str, nn.Module]]:
        kinds = loading.linears()
        layers = [(n, m) for n, m in self.model.named_modules() if isinstance(m, kinds)]
        with torch.no_grad():
            yield from layers
