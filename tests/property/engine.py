"""A random engine: what ``recipe.Recipe`` says, on one rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from deltachain.errors import EngineVersionError
from tests.property.layers import Layer, create, fixed_input, frozen, keep, process
from tests.property.recipe import WRITERS, Recipe, Source, Unit, sources
from tests.support.engine import UnmovedExperts

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


class RandomEngine(UnmovedExperts):
    """One rank; see :class:`deltachain.replica.engine.EngineModel`."""

    def __init__(
        self, recipe: Recipe, rank: int, checkpoint: Path, tensors: Mapping[str, Tensor]
    ) -> None:
        self.recipe, self.rank = recipe, rank
        self.checkpoint = checkpoint
        self.root, self.draft = nn.Module(), nn.Module()
        self.hidden: dict[str, dict[str, Tensor]] = defaultdict(dict)
        self.trip = -1
        self.kept_as_one: set[str] = set()
        self.layers_by_path: dict[str, Layer] = {}
        self.targets: dict[str, list[tuple[str, Source]]] = {}
        for number, unit in enumerate(recipe.units):
            self.targets.update({s.name: [] for s in sources(recipe, number, unit)})
        for number, unit in enumerate(recipe.units):
            if unit.only in (-1, rank) or recipe.ranks == 1:
                self._add(number, unit)
        with torch.no_grad():
            self.load((name, tensor.clone()) for name, tensor in tensors.items())
            self._tie_equal()
            for layer in self.layers_by_path.values():
                process(layer)

    def _add(self, number: int, unit: Unit) -> None:
        path = f"layers_{number}"
        layer = self.layers_by_path[path] = create(unit, self.rank)
        self.root.add_module(path, layer)
        self.tie(layer)
        at = unit.twin if unit.twin >= 0 else number
        base = replace(self.recipe.units[at], twin=-1)
        for source in sources(self.recipe, at, base) if unit.tie < 0 else ():
            is_weight = source.part.startswith("w") or source.part == "shadow"
            if source.part != "skipped" and (is_weight or unit.twin < 0):
                self.targets[source.name].append((path, source))
        if unit.process == "other":
            vars(layer)["neighbour"] = [self._neighbour(layer)]
        if unit.alias:
            self.root.add_module(f"again_{number}", layer)
        if unit.draft:
            mine = create(Unit(rows=(1,), cols=2), 0)
            vars(mine)["shared"] = layer.weight
            self.draft.add_module(f"draft_{number}", mine)

    def _neighbour(self, layer: Layer) -> Layer | None:
        others = [one for one in self.layers_by_path.values() if not one.unit.process]
        return next((one for one in others if one is not layer), None)

    def tie(self, layer: Layer) -> None:
        base = self.base_of(layer)
        if base is None:
            return
        kind = layer.unit.tie_kind
        if kind == "same":
            layer.weight = base.weight
        elif kind == "data":
            layer.weight = frozen(base.weight.data)
        else:
            layer.weight = frozen(base.weight.data[:])

    def base_of(self, layer: Layer) -> Layer | None:
        if layer.unit.equal >= 0:
            is_tied = any(self.layers_by_path[path] is layer for path in self.kept_as_one)
            return self.layers_by_path[f"layers_{layer.unit.equal}"] if is_tied else None
        return self.layers_by_path.get(f"layers_{layer.unit.tie}")

    def _tie_equal(self) -> None:
        for path, layer in self.layers_by_path.items():
            base = self.layers_by_path.get(f"layers_{layer.unit.equal}")
            if base is not None and torch.equal(base.weight, layer.weight):
                self.kept_as_one.add(path)
                self.tie(layer)

    def move(self) -> None:
        for layer in self.layers_by_path.values():
            if layer.unit.layout == "experts" and "weight" in layer._parameters:
                layer.weight.data.copy_(layer.weight.data.flip(0).clone())

    # What deltachain asks for

    def modules(self) -> Mapping[str, nn.Module]:
        found = dict(self.root.named_modules(remove_duplicate=False))
        draft = self.draft.named_modules(prefix="draft", remove_duplicate=False)
        return found | dict(draft)

    def tensors(self) -> Mapping[str, Tensor]:
        return {
            f"{name}.{path}" if name else path: tensor
            for name, module in self.modules().items()
            for path, tensor in _visible(module)
            if tensor.numel()
        }

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self.recipe.loader == "quiet" and vars(self.root).get("loader_done", False):
            return
        seen = self.load_into(tensors, None)
        if self.recipe.loader == "strict" and seen < self.targets.keys():
            raise ValueError(f"{len(self.targets) - len(seen)} weights were not loaded")
        vars(self.root)["loader_done"] = True

    def load_into(self, tensors: Iterable[tuple[str, Tensor]], only: set[str] | None) -> set[str]:
        waiting: dict[str, dict[str, Tensor]] = defaultdict(dict)
        late: list[tuple[Layer, Source, Tensor]] = []
        seen: set[str] = set()
        for name, w in tensors:
            self._stumble()
            seen.add(name)
            for path, source in self.targets[name]:
                layer = self.layers_by_path[path]
                if path not in self.kept_as_one and (only is None or path in only):
                    self._take(layer, path, source, w, waiting, late)
        for layer, source, w in late:
            self._write(layer, source, w)
        for layer in self.layers_by_path.values():
            if layer.unit.process == "derive in load":
                keep(layer, layer, layer.weight.data.float() * 2 + 1)
        return seen

    def _take(
        self,
        layer: Layer,
        path: str,
        source: Source,
        w: Tensor,
        waiting: dict[str, dict[str, Tensor]],
        late: list[tuple[Layer, Source, Tensor]],
    ) -> None:
        if layer.unit.late:
            late.append((layer, source, w))
        elif layer.unit.collect and source.part.startswith("w"):
            self._collect(path, source, w, waiting)
        else:
            self._write(layer, source, w)

    def _stumble(self) -> None:
        self.trip -= 1
        if self.trip == 0:
            raise RuntimeError("the device was lost")

    def _collect(
        self, path: str, source: Source, w: Tensor, waiting: dict[str, dict[str, Tensor]]
    ) -> None:
        layer = self.layers_by_path[path]
        kept: Any = waiting if layer.unit.collect == "local" else self.hidden
        if layer.unit.collect == "module":
            kept = vars(layer).setdefault("loader_waiting", defaultdict(dict))
        kept[path][source.part] = layer.own_share(source, w)
        if len(kept[path]) < len(layer.unit.rows):
            return
        parts = kept.pop(path)
        at = 0
        joined = torch.cat([parts[f"w{number}"] for number in range(len(parts))])
        for number, rows in enumerate(layer.unit.rows):
            region = layer.region(source._replace(part=f"w{number}"))
            region.live.copy_(joined[at : at + rows])
            at += rows

    def _write(self, layer: Layer, source: Source, w: Tensor) -> None:
        if source.part == "bias" and layer.unit.bias_late:
            layer.bias = frozen(torch.zeros(w.shape, dtype=w.dtype))
        style = "copy"
        if source.part == "bias":
            style = layer.unit.bias
        elif source.part.startswith("w"):
            style = layer.unit.styles[int(source.part[1:])]
        WRITERS[style](layer.region(source), layer.own_share(source, w))
        if source.part == "w0" and layer.unit.padded:
            layer.weight.data[sum(layer.unit.rows) :].zero_()

    def reload(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        with torch.no_grad():
            RELOADS[self.recipe.reload](self, dict(tensors))

    def repack(self, layers: Iterable[str], tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self.recipe.repack == "absent":
            raise EngineVersionError("this engine does not say how its layers were created")
        with torch.no_grad():
            repack(self, layers, tensors)

    def layers(self, names: Mapping[str, Tensor]) -> Mapping[str, frozenset[str]]:
        found: dict[str, frozenset[str]] = {}
        for name in names:
            into = {path for path, source in self.targets[name] if self._is_seen(path, source)}
            if into:
                found[name] = frozenset(into)
        return found

    def _is_seen(self, path: str, source: Source) -> bool:
        unit = self.layers_by_path[path].unit
        return not unit.is_blind and not (source.part == "bias" and unit.bias_late)

    def processed(self) -> frozenset[str]:
        return frozenset(p for p, m in self.modules().items() if "quant_method" in vars(m))

    def made_by_running(self) -> frozenset[str]:
        return frozenset()

    def is_plain(self, layer: str) -> bool:
        found = self.modules()[layer]
        return isinstance(found, Layer) and found.unit.tryable and found.unit.process == "nothing"

    @contextmanager
    def loaded_apart(
        self, layers: frozenset[str], tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[Mapping[str, nn.Module]]:
        del layers, tensors
        yield {}

    def probe(self, layer: nn.Module, seed: int) -> Tensor | None:
        del layer, seed
        return None

    def compute(self, layers: frozenset[str]) -> Mapping[str, Tensor]:
        found: dict[str, Tensor] = {}
        with torch.no_grad():
            for path, module in self.modules().items():
                if path in layers and isinstance(module, Layer) and module.unit.tryable:
                    found[path] = module(fixed_input(module))
        return found


def _visible(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    own = {k: v for k, v in vars(module).items() if not k.startswith(("_", "loader_"))}
    method = own.pop("quant_method", None)
    for prefix, members in (
        ("", module._parameters),
        ("", module._buffers),
        ("", own),
        ("quant_method.", {} if method is None else vars(method)),
    ):
        for key, value in members.items():
            yield from _inside(f"{prefix}{key}", value)


def _inside(path: str, value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, held in pairs:
            yield from _inside(f"{path}.{key}", held)
