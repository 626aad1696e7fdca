"""vLLM's own layerwise reload, limited to layers that tensors are loaded into."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

from deltachain_vllm.compat import acts_last, layerwise, own_loader, process

NOISY: Final = "vllm.model_executor.model_loader.reload.layerwise"
"""Logger that warns of every layer without loaded tensors in a partial reload."""


def reload(model: nn.Module, load: Callable[[], object], config: Any) -> None:  # noqa: ANN401
    """Reload layer by layer, as vLLM does; after a failure, leave no layer half loaded.

    Args:
        model: Model of the worker; not in use meanwhile.
        load: Function that calls the model's own loader.
        config: vLLM's configuration of the model.
    """
    steps = layerwise()
    with _silent(), _absent_kept(model), _finished(model, steps):
        steps.initialize_layerwise_reload(model)
        load()
        touched = {layer for layer in model.modules() if _is_touched(steps, layer)}
        for layer in model.modules():
            if layer not in touched and not (
                acts_last(layer) and not touched.isdisjoint(layer.modules())
            ):
                _abandon(steps, layer)
        steps.finalize_layerwise_reload(model, config)
        _pack_tied(model, touched)


def _is_touched(steps: Any, layer: nn.Module) -> bool:  # noqa: ANN401
    """Return whether any tensor was loaded into a layer, including finished layers."""
    info = steps.get_layerwise_info(layer)
    return not info.can_load() or info.load_numel > 0


def _pack_tied(model: nn.Module, touched: set[nn.Module]) -> None:
    """Pack layers tied to a reloaded layer again, since no tensors are loaded into them."""
    held = {_at(p) for layer in touched for p in layer._parameters.values()} - {0}
    for layer in model.modules():
        if layer not in touched and any(_at(p) in held for p in layer._parameters.values()):
            process(layer)


def _at(parameter: nn.Parameter | None) -> int:
    return parameter.data_ptr() if parameter is not None and parameter.numel() else 0


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


@contextmanager
def _finished(model: nn.Module, steps: Any) -> Iterator[None]:  # noqa: ANN401
    """Clean up an interrupted reload at the end; do nothing after a complete one."""
    try:
        yield
    finally:
        for layer in model.modules():
            _abandon(steps, layer)


def _abandon(steps: Any, layer: nn.Module) -> None:  # noqa: ANN401
    """Restore the members of a layer from before the reload, and its bias with its own loader."""
    info = steps.get_layerwise_info(layer)
    if not info.can_load():
        return
    if info.kernel_tensors is not None:
        steps._place_kernel_tensors(layer, info)
    for tensor in steps.get_layer_tensors(layer).values():
        own_loader(tensor)
    info.reset()
