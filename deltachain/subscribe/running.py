"""Tensors that modules make when they run: tables made once from weights, and kept.

No load makes such a tensor again, so that it looks like a constant. It is told from one by what a
model held when it had been loaded and had not run, and what appears later is forgotten whenever
weights are written: the module makes it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from deltachain.subscribe.members import containers_of, digest_of, tensors_in

CASTS: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that an engine may cast a table to when it first runs."""

KV: Final = "kv_cache"
"""In names of what requests cached, which is no table."""

_TORCHS: Final = vars(nn.Module()).keys() - {"_buffers"}
"""Attributes of every module."""

_loaded: WeakKeyDictionary[nn.Module, Loaded] = WeakKeyDictionary()


class Loaded:
    """What modules with weights of their own held beside them when a model had been loaded.

    Args:
        model: That has not run.
    """

    def __init__(self, model: nn.Module) -> None:
        self._digests = {name: set(_casts(tensor)) for name, tensor in _beside_weights(model)}

    def changed(self, model: nn.Module) -> frozenset[str]:
        """Tensors of floating-point numbers that are new, or hold something else."""
        return frozenset(
            name
            for name, tensor in _beside_weights(model)
            if tensor.is_floating_point() and digest_of(tensor) not in self._digests.get(name, ())
        )


def remember(model: nn.Module) -> None:
    """Record what a model holds that was loaded, and has not run."""
    _loaded[model] = Loaded(model)


def made_by_running(model: nn.Module) -> frozenset[str]:
    """Live tensors that running a model made or changed; none where it was not recorded."""
    found = _loaded.get(model)
    return found.changed(model) if found is not None else frozenset()


def _beside_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors beside the parameters of modules that have some of their own, by dotted name."""
    for prefix, module in _weighted(dict(model.named_modules())).items():
        for path, tensor in tensors_in(module):
            name = f"{prefix}.{path}" if prefix else path
            if not isinstance(tensor, nn.Parameter) and not tensor.is_meta and KV not in path:
                yield name, tensor


def _weighted(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {n: one for n, one in modules.items() if any(True for _ in one.parameters(False))}


class Tables:
    """What modules with weights of their own keep, so that what they add can be forgotten.

    Args:
        modules: By name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        boxes = [box for one in _weighted(modules).values() for box in _dictionaries(one)]
        self._boxes = [
            (box, {k for k, v in box.items() if v is not None}, set(box)) for box in boxes
        ]

    def forget(self) -> None:
        """Drop the tensors that were added; the modules make them again when they need them."""
        for box, filled, known in self._boxes:
            for key in box.keys() - filled:
                if KV in str(key) or not _is_table(box[key]):
                    continue
                if key in known:
                    box[key] = None
                else:
                    del box[key]


def _dictionaries(module: nn.Module) -> Iterator[dict[Any, Any]]:
    """The dictionaries that a module itself keeps things in, but for those that torch keeps."""
    own = {id(box) for key, box in vars(module).items() if key in _TORCHS}
    for box in containers_of(module):
        if isinstance(box, dict) and id(box) not in own:
            yield box


def _is_table(value: object) -> bool:
    values = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(one, Tensor) for one in values)


def _casts(tensor: Tensor) -> Iterator[bytes]:
    yield digest_of(tensor)
    if tensor.is_floating_point():
        yield from (digest_of(tensor.to(dtype)) for dtype in CASTS)
