"""One vLLM worker's model, as deltachain asks for it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.utils.torch_utils import set_default_torch_dtype

from deltachain.checkpoint import named_folder
from deltachain.subscribe.members import Members
from deltachain.subscribe.probe import is_plain, layers_of, output_of, processed
from deltachain.subscribe.recorder import live_tensors
from deltachain_vllm.compat import check_version, layerwise, linears
from deltachain_vllm.repacking import repack

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NOISY: Final = "vllm.model_executor.model_loader.reload.layerwise"
"""Warns of every layer that a partial reload leaves alone."""


def checkpoint_of(config: VllmConfig) -> Path:
    """The folder that vLLM loads, in the Hub's cache where it is named by repository."""
    model = config.model_config
    cache = config.load_config.download_dir
    return named_folder(str(model.model), revision=model.revision, cache=cache)


class VllmModel:
    """See :class:`deltachain.subscribe.engine.EngineModel`.

    Args:
        model: As vLLM loaded it.
        config: The worker's.

    Raises:
        EngineVersionError: This vLLM was not tested.
    """

    def __init__(self, model: nn.Module, config: VllmConfig) -> None:
        check_version()
        self.model = model
        self.config = config

    @property
    def checkpoint(self) -> Path:
        """The folder that vLLM loaded."""
        return checkpoint_of(self.config)

    def modules(self) -> Mapping[str, nn.Module]:
        """Every module of the model."""
        return dict(self.model.named_modules())

    def tensors(self) -> Mapping[str, Tensor]:
        """Every live tensor but the KV cache."""
        found = live_tensors(self.model)
        return {name: t for name, t in found.items() if not name.endswith("kv_cache")}

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> object:
        """The model's own ``load_weights``."""
        with set_current_vllm_config(self.config):
            return self.model.load_weights(tensors)  # type: ignore[operator]

    def reload(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Reload layer by layer, as vLLM does; if it fails, no layer is left half loaded."""
        reload = layerwise()
        noisy = logging.getLogger(NOISY)
        level = noisy.level
        noisy.setLevel(logging.ERROR)
        try:
            with set_current_vllm_config(self.config):
                reload.initialize_layerwise_reload(self.model)
                self.model.load_weights(tensors)  # type: ignore[operator]
                reload.finalize_layerwise_reload(self.model, self.config.model_config)
                self._pack_tied()
        finally:
            noisy.setLevel(level)
            self._abandon(reload)

    def repack(self, layers: Iterable[str], tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See :mod:`deltachain_vllm.repacking`."""
        dtype = self.config.model_config.dtype
        with (
            set_current_vllm_config(self.config),
            set_default_torch_dtype(dtype),
            torch.no_grad(),
        ):
            repack(self.model, layers, lambda: self.model.load_weights(tensors), dtype)  # type: ignore[operator]

    def _pack_tied(self) -> None:
        """Pack layers whose weight is another layer's again: the reload packs that other one."""
        seen: set[int] = set()
        for layer in self.model.modules():
            weight = getattr(layer, "weight", None)
            if isinstance(layer, linears()) and isinstance(weight, Tensor) and weight.numel():
                if _storage(weight) in seen:
                    layer.quant_method.process_weights_after_loading(layer)  # type: ignore[union-attr, operator]
                seen.add(_storage(weight))

    def _abandon(self, reload: Any) -> None:  # noqa: ANN401
        """End a reload that stopped in the middle; nothing is left to do after one that did not."""
        for layer in self.model.modules():
            info = reload.get_layerwise_info(layer)
            if not info.can_load():
                continue
            if info.kernel_tensors is not None:
                reload._place_kernel_tensors(layer, info)
            info.reset()

    def layers(self, names: Mapping[str, Tensor]) -> Mapping[str, frozenset[str]]:
        """Load meta tensors into a meta copy of every layer, as it was before it was packed."""
        with self._as_before_loading() as owner, set_current_vllm_config(self.config):
            return layers_of(self.model.load_weights, names, owner)  # type: ignore[arg-type]

    @contextmanager
    def _as_before_loading(self) -> Iterator[dict[int, str]]:
        """Every layer as it was before loading, most of it on the meta device; whose is what."""
        reload = layerwise()
        kept = Members(self.model.modules())
        owner: dict[int, str] = {}
        try:
            for name, layer in self.model.named_modules():
                reload.restore_layer_on_meta(layer, reload.get_layerwise_info(layer))
                for tensor in (*layer._parameters.values(), *layer._buffers.values()):
                    if tensor is None:
                        continue
                    if tensor.is_meta and hasattr(tensor, "weight_loader"):
                        tensor.weight_loader = reload._get_original_loader(tensor)
                    owner.setdefault(_storage(tensor), name)
            yield owner
        finally:
            kept.put_back()

    def processed(self) -> frozenset[str]:
        """Layers that have something to do after loading."""
        return processed(self.model)

    def is_plain(self, layer: str) -> bool:
        """See :class:`EngineModel`; linear layers alone."""
        found = self.model.get_submodule(layer)
        with set_current_vllm_config(self.config), torch.no_grad():
            return isinstance(found, linears()) and is_plain(found)

    def compute(self, layers: frozenset[str]) -> Mapping[str, Tensor]:
        """Outputs of the linear layers among these whose weight can not be read or is a copy."""
        found = {}
        with set_current_vllm_config(self.config), torch.no_grad():
            for name, layer in self.model.named_modules():
                if name in layers and isinstance(layer, linears()):
                    found[name] = output_of(layer)
        return {name: output for name, output in found.items() if output is not None}


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
