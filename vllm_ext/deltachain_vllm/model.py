"""Adapter of one vLLM worker's model to deltachain's interface."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.utils.torch_utils import set_default_torch_dtype

from deltachain.checkpoint import named_folder
from deltachain.replica.layout.layer_probe import is_plain, processed
from deltachain.replica.layout.loaded_layers import Owners, layers_of
from deltachain.replica.layout.members import Members, tensors_in
from deltachain.replica.layout.provenance import storage_id
from deltachain.replica.layout.runtime_tables import made_by_running
from deltachain_vllm.apart import loaded_apart
from deltachain_vllm.captured import uncaptured
from deltachain_vllm.columns import compared, is_compared
from deltachain_vllm.compat import check_experts, check_version, layerwise, linears, own_loader
from deltachain_vllm.computing import computed, probe, taken_over
from deltachain_vllm.reloading import reload
from deltachain_vllm.repacking import repack
from deltachain_vllm.scales import owned

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def checkpoint_of(config: VllmConfig) -> Path:
    """Return the folder that vLLM loads; for a repository name, its folder in the Hub's cache."""
    model = config.model_config
    cache = config.load_config.download_dir
    return named_folder(str(model.model), revision=model.revision, cache=cache)


class VllmModel:
    """A worker's model as :class:`deltachain.replica.engine.EngineModel`.

    Args:
        model: Model as vLLM loaded it.
        config: Configuration of the worker.
        draft: Model that drafts tokens for it, if any; nothing is loaded into it.

    Raises:
        EngineVersionError: This vLLM was not tested.
        ConfigError: It moves experts while it serves.
    """

    def __init__(
        self, model: nn.Module, config: VllmConfig, draft: nn.Module | None = None
    ) -> None:
        check_version()
        check_experts(config)
        self.model = model
        self.config = config
        self.draft = draft

    @property
    def checkpoint(self) -> Path:
        """Folder of the checkpoint that vLLM loaded."""
        return checkpoint_of(self.config)

    def modules(self) -> Mapping[str, nn.Module]:
        """Return every module; those only in a draft model have names below ``draft``."""
        found = dict(self.model.named_modules())
        if self.draft is not None:
            known = set(found.values())
            drafting = self.draft.named_modules(prefix="draft")
            found.update((name, module) for name, module in drafting if module not in known)
        return found

    def tensors(self) -> Mapping[str, Tensor]:
        """Return every live tensor except the KV cache."""
        return {
            f"{name}.{path}" if name else path: tensor
            for name, module in self.modules().items()
            for path, tensor in tensors_in(module)
            if tensor.numel() and not tensor.is_meta and "kv_cache" not in path
        }

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> object:
        """Call the model's own ``load_weights``."""
        with set_current_vllm_config(self.config):
            return self.model.load_weights(tensors)  # type: ignore[operator]

    def reload(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Reload whole layers; see :mod:`deltachain_vllm.reloading`."""
        with self._as_when_loading(), compared(self.model), uncaptured(self.model, self.config):
            reload(self.model, partial(self.load, tensors), self.config.model_config)

    def repack(self, layers: Iterable[str], tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load and pack layers from nothing; see :mod:`deltachain_vllm.repacking`."""
        known = dict(self.model.named_modules())
        mine = [name for name in layers if name in known]
        with self._as_when_loading(), compared(self.model), uncaptured(self.model, self.config):
            repack(self.model, mine, partial(self.load, tensors), self.config.model_config.dtype)

    @contextmanager
    def loaded_apart(
        self, layers: frozenset[str], tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[Mapping[str, nn.Module]]:
        """Load layers into copies of them; see :mod:`deltachain_vllm.apart`."""
        known = dict(self.model.named_modules())
        mine = [name for name in layers if name in known]
        dtype = self.config.model_config.dtype
        with self._as_when_loading():
            yield loaded_apart(self.model, mine, partial(self.load, tensors), dtype)

    def probe(self, layer: nn.Module, seed: int) -> Tensor | None:
        """Return the outputs of a linear layer or of experts for several rows."""
        with set_current_vllm_config(self.config):
            return probe(layer, seed)

    @contextmanager
    def _as_when_loading(self) -> Iterator[None]:
        dtype = self.config.model_config.dtype
        with (
            set_current_vllm_config(self.config),
            set_default_torch_dtype(dtype),
            torch.no_grad(),
            owned(),
        ):
            yield

    def layers(self, names: Mapping[str, Tensor]) -> Mapping[str, frozenset[str]]:
        """Find layers by loading meta tensors into a meta copy of each layer before packing."""
        with self._as_before_loading() as owners, set_current_vllm_config(self.config):
            mine = dict(self.model.named_modules())
            return layers_of(self.model.load_weights, names, owners, mine)  # type: ignore[arg-type]

    @contextmanager
    def _as_before_loading(self) -> Iterator[Owners]:
        """Reset every layer to before loading, mostly on the meta device; yield tensor owners."""
        steps = layerwise()
        kept = Members(self.model.modules())
        owner: dict[int, str] = {}
        try:
            for name, layer in self.model.named_modules():
                steps.restore_layer_on_meta(layer, steps.get_layerwise_info(layer))
                for tensor in (*layer._parameters.values(), *layer._buffers.values()):
                    if tensor is None:
                        continue
                    own_loader(tensor)
                    owner.setdefault(storage_id(tensor), name)
            yield lambda tensor: _known(owner, tensor)
        finally:
            kept.put_back()

    def processed(self) -> frozenset[str]:
        """Return the layers with post-load processing."""
        return processed(self.model)

    def made_by_running(self) -> frozenset[str]:
        """Return tensors created by running, without a draft model's, which are unknown."""
        return made_by_running(self.model)

    def is_plain(self, layer: str) -> bool:
        """Return whether a layer is plain; only linear layers can be."""
        found = self.model.get_submodule(layer)
        with set_current_vllm_config(self.config), torch.no_grad():
            return isinstance(found, linears()) and (is_plain(found) or is_compared(found))

    def compute(self, layers: frozenset[str]) -> Mapping[str, Tensor]:
        """Return the outputs of layers; see :mod:`deltachain_vllm.computing`."""
        modules = self.modules()
        with set_current_vllm_config(self.config):
            outputs = {n: computed(m) for n, m in modules.items() if n in layers}
            outputs |= taken_over({n: m for n, m in modules.items() if n in layers}, modules)
        return {name: output for name, output in outputs.items() if output is not None}


def _known(owner: Mapping[int, str], tensor: Tensor) -> frozenset[str]:
    """Return the layer that a tensor's storage belongs to."""
    found = owner.get(storage_id(tensor))
    return frozenset() if found is None else frozenset([found])
