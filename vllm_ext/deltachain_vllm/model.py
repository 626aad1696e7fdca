"""Adapter of one vLLM worker's model to deltachain's interface."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.utils.torch_utils import set_default_torch_dtype

from deltachain.checkpoint import named_folder
from deltachain.replica.layout.loaded_checkpoint import Owners, layers_of
from deltachain.replica.layout.model_state import is_plain, processed
from deltachain.replica.layout.module_members import Members, storage_id, tensors_in
from deltachain.replica.layout.runtime_tables import made_by_running

from . import compat, moving_experts
from .layer_outputs import compared, computed, is_compared, taken_over
from .repacking import address_of, loaded_apart, repack
from .scales import owned, uncaptured

NOISY: Final = "vllm.model_executor.model_loader.reload.layerwise"
"""Logger that warns of every layer without loaded tensors in a partial reload."""


def reload(model: nn.Module, load: Callable[[], object], config: Any) -> None:
    """Reload layer by layer, as vLLM does; after a failure, leave no layer half loaded."""
    steps = compat.layerwise()
    with _silent(), _absent_kept(model):
        try:
            steps.initialize_layerwise_reload(model)
            load()
            found = {layer: steps.get_layerwise_info(layer) for layer in model.modules()}
            touched = {n for n, info in found.items() if not info.can_load() or info.load_numel > 0}
            for layer in model.modules():
                if layer not in touched and not (
                    compat.acts_last(layer) and not touched.isdisjoint(layer.modules())
                ):
                    _abandon(steps, layer)
            steps.finalize_layerwise_reload(model, config)
            _pack_tied(model, touched)
        finally:  # of an interrupted reload; after a complete one there is nothing to abandon
            for layer in model.modules():
                _abandon(steps, layer)


def _pack_tied(model: nn.Module, touched: set[nn.Module]) -> None:
    """Pack layers tied to a reloaded layer again, since no tensors are loaded into them."""
    held = {address_of(p): layer for layer in touched for p in layer._parameters.values()}
    held.pop(0, None)
    for layer in model.modules():
        tied = [held.get(address_of(p)) for p in layer._parameters.values()]
        first = next((one for one in tied if one is not None), None)
        if layer not in touched and first is not None and not compat.computes_alike(layer, first):
            compat.process(layer)


@contextmanager
def _silent() -> Iterator[None]:
    noisy = logging.getLogger(NOISY)
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        yield
    finally:
        noisy.setLevel(level)


@contextmanager
def _absent_kept(model: nn.Module) -> Iterator[None]:
    """Put back parameters that are ``None``: vLLM does not record them, and kernels look for them.

    CPU kernels of eight bits leave ``None`` in the place of a weight that they packed.
    """
    absent = [
        (layer, n) for layer in model.modules() for n, p in layer._parameters.items() if p is None
    ]
    try:
        yield
    finally:
        for layer, name in absent:
            if not hasattr(layer, name):
                layer.register_parameter(name, None)


def _abandon(steps: Any, layer: nn.Module) -> None:
    """Restore the members of a layer from before the reload, and its bias with its own loader."""
    info = steps.get_layerwise_info(layer)
    if not info.can_load():
        return
    if info.kernel_tensors is not None:
        steps._place_kernel_tensors(layer, info)
    for tensor in steps.get_layer_tensors(layer).values():
        compat.own_loader(tensor)
    info.reset()


def checkpoint_of(config: VllmConfig) -> Path:
    """Return the folder that vLLM loads; for a repository name, its folder in the Hub's cache."""
    model = config.model_config
    cache = config.load_config.download_dir
    return named_folder(str(model.model), revision=model.revision, cache=cache)


class VllmModel:
    """A worker's model as an ``EngineModel``; nothing is loaded into a draft, except its heads.

    Args:
        model: The model.
        config: vLLM's configuration of its engine.
        draft: The model that drafts for it.
        balancer: The runner's ``EplbState``, with ``--enable-eplb``.
    """

    def __init__(
        self,
        model: nn.Module,
        config: VllmConfig,
        draft: nn.Module | None = None,
        balancer: Any = None,
    ) -> None:
        compat.check_experts(config, has_map=balancer is not None)
        self.model = model
        self.config = config
        self.draft = draft
        self._balancer, self._loaded = balancer, {"": model}
        if draft is not None and compat.has_heads(config):
            self.model, self.draft = compat.with_heads(model, draft), None
            self._loaded["draft."] = draft

    @property
    def checkpoint(self) -> Path:
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
        return {
            f"{name}.{path}" if name else path: tensor
            for name, module in self.modules().items()
            for path, tensor in tensors_in(module)
            if tensor.numel() and not tensor.is_meta and "kv_cache" not in path
        }

    def slots(self) -> Mapping[str, tuple[int, ...]]:
        return moving_experts.slots(self.model, self._balancer) if self._balancer else {}

    def _experts_found(self) -> AbstractContextManager[None]:
        return moving_experts.found(self.model, self._balancer) if self._balancer else nullcontext()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> object:
        with set_current_vllm_config(self.config), self._experts_found():
            return self.model.load_weights(tensors)  # type: ignore[operator]

    def reload(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        with self._as_when_loading(), compared(self.model), uncaptured(self.model, self.config):
            reload(self.model, partial(self.load, tensors), self.config.model_config)

    def repack(self, layers: Iterable[str], tensors: Iterable[tuple[str, Tensor]]) -> None:
        dtype = self.config.model_config.dtype
        with self._as_when_loading(), compared(self.model), uncaptured(self.model, self.config):
            repack(self.model, self._mine(layers), partial(self.load, tensors), dtype)

    @contextmanager
    def loaded_apart(
        self, layers: frozenset[str], tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[Mapping[str, nn.Module]]:
        dtype = self.config.model_config.dtype
        with self._as_when_loading():
            yield loaded_apart(self.model, self._mine(layers), partial(self.load, tensors), dtype)

    def _mine(self, layers: Iterable[str]) -> list[str]:
        known = dict(self.model.named_modules())
        return [name for name in layers if name in known]

    def probe(self, layer: nn.Module, seed: int) -> Tensor | None:
        with set_current_vllm_config(self.config):
            return computed(layer, seed)

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
        with (
            self._as_before_loading() as owners,
            set_current_vllm_config(self.config),
            self._experts_found(),
        ):
            mine = dict(self.model.named_modules())
            return layers_of(self.model.load_weights, names, owners, mine)  # type: ignore[arg-type]

    @contextmanager
    def _as_before_loading(self) -> Iterator[Owners]:
        """Reset every layer to before loading, mostly on the meta device; yield tensor owners."""
        steps = compat.layerwise()
        kept = Members(self.model.modules())
        owner: dict[int, str] = {}
        try:
            for name, layer in self.model.named_modules():
                steps.restore_layer_on_meta(layer, steps.get_layerwise_info(layer))
                for tensor in (*layer._parameters.values(), *layer._buffers.values()):
                    if tensor is None:
                        continue
                    compat.own_loader(tensor)
                    owner.setdefault(storage_id(tensor), name)
            yield lambda tensor: _known(owner, tensor)
        finally:
            kept.put_back()

    def processed(self) -> frozenset[str]:
        return processed(self.model)

    def made_by_running(self) -> frozenset[str]:
        """Return tensors created by running, except in a draft that keeps its weights."""
        loaded = self._loaded.items()
        return frozenset(prefix + name for prefix, one in loaded for name in made_by_running(one))

    def is_plain(self, layer: str) -> bool:
        found = self.model.get_submodule(layer)
        with set_current_vllm_config(self.config), torch.no_grad():
            return isinstance(found, compat.linears()) and (is_plain(found) or is_compared(found))

    def compute(self, layers: frozenset[str]) -> Mapping[str, Tensor]:
        modules = self.modules()
        with set_current_vllm_config(self.config):
            outputs = {n: computed(m) for n, m in modules.items() if n in layers}
            outputs |= taken_over({n: m for n, m in modules.items() if n in layers}, modules)
        return {name: output for name, output in outputs.items() if output is not None}


def _known(owner: Mapping[int, str], tensor: Tensor) -> frozenset[str]:
    found = owner.get(storage_id(tensor))
    return frozenset() if found is None else frozenset([found])
