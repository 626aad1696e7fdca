"""How engines load whole layers again: well, in part, not at all, or to the harm of others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from deltachain.errors import EngineVersionError
from tests.property.layers import Layer, create, process

if TYPE_CHECKING:
    from tests.property.engine import RandomEngine

Tensors = Mapping[str, Tensor]


def _affected(engine: RandomEngine, tensors: Tensors, *, with_tied: bool = True) -> list[str]:
    needed: dict[str, set[str]] = {}
    for name, targets in engine.targets.items():
        for path, _ in targets:
            needed.setdefault(path, set()).add(name)
    whole = {path for path, names in needed.items() if names <= tensors.keys()}
    tied = {
        path
        for path, layer in engine.layers_by_path.items()
        if with_tied and f"layers_{layer.unit.tie}" in whole
    }
    return [path for path in engine.layers_by_path if path in whole | tied]


def make_raw(engine: RandomEngine, paths: Iterable[str], *, pristine: bool) -> None:
    for path in paths:
        layer = engine.layers_by_path[path]
        raw = create(layer.unit, layer.rank)
        layer._parameters, layer._buffers = raw._parameters, raw._buffers
        layer._non_persistent_buffers_set = raw._non_persistent_buffers_set
        if pristine:
            kept = {
                k: v
                for k, v in vars(layer).items()
                if k in ("neighbour", "training", "unit", "rank") or k.startswith("_")
            }
            vars(layer).clear()
            vars(layer).update(kept)
            vars(layer).update({k: v for k, v in vars(raw).items() if k not in kept})
        if engine.base_of(layer) is not None:
            engine.tie(layer)


def _kernels(engine: RandomEngine, paths: Iterable[str]) -> dict[str, tuple[Any, Any]]:
    found = {}
    for path in paths:
        layer = engine.layers_by_path[path]
        found[path] = dict(layer._parameters), dict(layer._buffers)
    return found


def _place(layer: Layer, kernel: tuple[Any, Any]) -> None:
    own: tuple[dict[str, Any], ...] = (layer._parameters, layer._buffers)
    for members, before in zip(own, kernel, strict=True):
        for name, old in before.items():
            new = members.get(name)
            if (
                new is not None
                and old is not None
                and new.shape == old.shape
                and new.dtype == old.dtype
            ):
                if new.data_ptr() != old.data_ptr():
                    old.data.copy_(new.data)
                members[name] = old


def _reload(
    engine: RandomEngine,
    tensors: Tensors,
    *,
    with_tied: bool = True,
    processes: bool = True,
    places: bool = True,
) -> list[str]:
    paths = _affected(engine, tensors, with_tied=with_tied)
    kernels = _kernels(engine, paths)
    make_raw(engine, paths, pristine=False)
    engine.load_into(tensors.items(), set(paths))
    for path in paths:
        if processes:
            process(engine.layers_by_path[path])
    for path in paths:
        if places:
            _place(engine.layers_by_path[path], kernels[path])
    return paths


def _midway(engine: RandomEngine, tensors: Tensors) -> None:
    paths = _affected(engine, tensors)
    make_raw(engine, paths, pristine=False)
    raise RuntimeError("a kernel is missing")


def _absent(engine: RandomEngine, tensors: Tensors) -> None:
    del engine, tensors
    raise EngineVersionError("this engine cannot reload")


def _nothing(engine: RandomEngine, tensors: Tensors) -> None:
    del engine, tensors


def _without_bias(engine: RandomEngine, tensors: Tensors) -> None:
    biases = {
        path: layer.bias.data.clone()
        for path, layer in engine.layers_by_path.items()
        if layer._parameters.get("bias") is not None
    }
    for path in _reload(engine, tensors):
        layer = engine.layers_by_path[path]
        bias = layer._parameters.get("bias")
        if path in biases and bias is not None:
            bias.data.copy_(biases[path])


def _damaging(engine: RandomEngine, tensors: Tensors) -> None:
    """Well done, but for a layer that nobody spoke of."""
    paths = _reload(engine, tensors)
    for path, layer in engine.layers_by_path.items():
        weight = layer._parameters.get("weight")
        if path not in paths and weight is not None:
            weight.data.zero_()


def _first_rows(engine: RandomEngine, tensors: Tensors) -> None:
    before = {
        path: layer.weight.data.clone()
        for path, layer in engine.layers_by_path.items()
        if "weight" in layer._parameters
    }
    for path in _reload(engine, tensors):
        if path in before:
            engine.layers_by_path[path].weight.data[1:] = before[path][1:]


RELOADS: Final[dict[str, Callable[[RandomEngine, Tensors], object]]] = {
    "right": _reload,
    "untied": lambda e, t: _reload(e, t, with_tied=False),
    "nothing": _nothing,
    "absent": _absent,
    "midway": _midway,
    "unprocessed": lambda e, t: _reload(e, t, processes=False),
    "without bias": _without_bias,
    "damaging": _damaging,
    "replacing": lambda e, t: _reload(e, t, places=False),
    "first rows": _first_rows,
}


def repack(
    engine: RandomEngine, layers: Iterable[str], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    by_module = {id(layer): path for path, layer in engine.layers_by_path.items()}
    modules = engine.modules()
    chosen = {by_module.get(id(modules[path]), "") for path in layers} - {""}
    paths = [path for path in engine.layers_by_path if path in chosen]
    make_raw(engine, paths, pristine=engine.recipe.repack != "packed still")
    done = vars(engine.root).pop("loader_done", False)
    try:
        if engine.recipe.repack == "midway":
            raise RuntimeError("a kernel is missing")
        engine.load(tensors)
    finally:
        vars(engine.root)["loader_done"] = done
    for path in paths:
        process(engine.layers_by_path[path])


__all__ = ["RELOADS", "make_raw", "repack"]
