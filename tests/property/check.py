"""One random engine examined: what is wrong with how it is followed, told with the least recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from deltachain.replica.layout.model_state import LoadMethod, load_with
from tests.property.engine import RandomEngine
from tests.property.layers import Layer, first, other
from tests.property.recipe import PURE, Recipe, loaders, modules, shares, smaller
from tests.property.trial_run import Outcome, differences, look, run, served

METHODS: tuple[LoadMethod, ...] = ("loaded", "reloaded", "repacked")


class Alternatives:
    """The ways in which one random engine could be updated."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder
        self.base = first(recipe)
        aliases = recipe.aliases()
        self.names = [name for name in self.base if name not in aliases]
        self.alias = {name: alias for alias, name in aliases.items()}

    def needless(self, refused: Iterable[str]) -> dict[str, str]:
        wanted = self.names if "*" in refused else [n for n in refused if n in self.names]
        found: dict[str, str] = {}
        for name in wanted:
            way = self._way(name)
            if not way:
                return {}
            found[name] = way
        return found

    def _way(self, name: str) -> str:
        if not any(self.changes[rank][name] for rank in range(self.recipe.ranks)):
            return "unused" if self._is_seen_unused() else ""
        if self._is_in_place(name):
            return "in_place"
        group = self._group(name)
        if not all(self._shows(one) for one in group):
            return ""
        return next((way for way in METHODS if self._is_right(way, group)), "")

    @cached_property
    def changes(self) -> list[dict[str, frozenset[str]]]:
        return [
            {name: self._modules(rank, name) for name in self.names}
            for rank in range(self.recipe.ranks)
        ]

    def _modules(self, rank: int, name: str) -> frozenset[str]:
        found: set[str] = set()
        was = served(look(self._engine(rank, self.base)))
        for turn in (1, 2):
            now = served(look(self._engine(rank, self._with([name], turn))))
            found |= {
                path.split(".")[0]
                for path in was.keys() | now.keys()
                if was.get(path) != now.get(path)
            }
        return frozenset(found)

    def _shows(self, name: str) -> bool:
        for rank in range(self.recipe.ranks):
            for turn in (1, 2):
                one = _visible(self._engine(rank, self.base))
                two = _visible(self._engine(rank, self._with([name], turn)))
                seen = {
                    path.split(".")[0]
                    for path in one.keys() | two.keys()
                    if one.get(path) != two.get(path)
                }
                if not self.changes[rank][name] <= seen:
                    return False
        return True

    def _group(self, name: str) -> list[str]:
        names, grown = {name}, True
        while grown:
            grown = False
            for rank in range(self.recipe.ranks):
                modules = frozenset().union(*(self.changes[rank][one] for one in names))
                more = {n for n in self.names if self.changes[rank][n] & modules} | self._beside(
                    names
                )
                grown |= not more <= names
                names |= more
        return [one for one in self.names if one in names]

    def _beside(self, names: Iterable[str]) -> set[str]:
        units = {name.rpartition(".")[0] for name in names}
        return {name for name in self.names if name.rpartition(".")[0] in units}

    def _is_in_place(self, name: str) -> bool:
        return all(
            self._is_pure(self._engine(rank, self.base), rank, name)
            for rank in range(self.recipe.ranks)
        )

    def _is_pure(self, engine: RandomEngine, rank: int, name: str) -> bool:
        paths = set()
        for path, source in engine.targets[name]:
            unit = engine.layers_by_path[path].unit
            paths.add(path)
            style = unit.bias if source.part == "bias" else "copy"
            if source.part.startswith("w"):
                style = unit.styles[int(source.part[1:])]
            late = source.part == "bias" and unit.bias_late
            weight = source.part.startswith("w") and (unit.shadow or unit.collect)
            if style not in PURE or late or weight or unit.stored != unit.live or unit.process:
                return False
        return all(
            path in paths or not engine.layers_by_path[path].unit.process
            for path in self.changes[rank][name]
            if path in engine.layers_by_path
        )

    def _is_right(self, way: LoadMethod, group: list[str]) -> bool:
        return all(self._is_right_on(rank, way, group) for rank in range(self.recipe.ranks))

    def _is_right_on(self, rank: int, way: LoadMethod, group: list[str]) -> bool:
        engine = self._engine(rank, self.base)
        modules = frozenset().union(*(self.changes[rank][name] for name in group))
        layers = frozenset(path for path in modules if isinstance(engine.modules()[path], Layer))
        if not layers:
            return True
        for turn in (0, 1, 0, 2):
            tensors = self._with(group, turn)
            given = {
                n: t.clone() for n, t in tensors.items() if n in group or n in self._aliases(group)
            }
            try:
                load_with(engine, way, layers, given.items())
            except Exception:  # noqa: BLE001 - then it is not a way
                return False
            wanted = served(look(self._engine(rank, tensors)))
            if differences(served(look(engine)), wanted):
                return False
        return True

    def _is_seen_unused(self) -> bool:
        if any(unit.process for unit in self.recipe.units):
            return any(self._is_right(way, self.names) for way in METHODS[1:])
        return any(self._is_right(way, self.names) for way in METHODS)

    def _aliases(self, names: Iterable[str]) -> set[str]:
        return {self.alias[name] for name in names if name in self.alias}

    def _with(self, names: Iterable[str], turn: int) -> dict[str, Tensor]:
        found = dict(self.base)
        for name in names if turn else ():
            found[name] = other(self.recipe, name, turn)
            if name in self.alias:
                found[self.alias[name]] = found[name].clone()
        return found

    def _engine(self, rank: int, tensors: Mapping[str, Tensor]) -> RandomEngine:
        return RandomEngine(self.recipe, rank, self.folder, tensors)


def _modules_that_differ(one: Mapping[str, object], other: Mapping[str, object]) -> set[str]:
    paths = one.keys() | other.keys()
    return {path.split(".")[0] for path in paths if one.get(path) != other.get(path)}


def _visible(engine: RandomEngine) -> dict[str, bytes]:
    found = {**engine.tensors()}
    for path, output in engine.compute(frozenset(engine.modules())).items():
        found[f"{path}.()"] = output
    return {
        path: tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for path, tensor in found.items()
    }


KNOWN: Final[Mapping[str, str]] = {
    "the tensor loaded last would overwrite the other": (
        "two tensors are written to one place; they could be loaded as one group, in their order"
    ),
    "loading it again would not verify it either": (
        "equal elements in a layer that is rearranged do not show where they go"
    ),
    "whose elements are all equal": (
        "it may be left out by a reload that leaves the same bits there"
    ),
    "nothing changes with": (
        "a reload may have left it out, and there is no load from nothing that confirms it"
    ),
    "does not change with": (
        "a layer that keeps a copy of it in an old kernel looks the same, where no load from "
        "nothing tells them apart"
    ),
    "neither inspected nor tested": (
        "a layer that hides its weights from the start could be reloaded, but nothing would show "
        "that the weights from before are put back"
    ),
    "do not arrive where it was recorded": (
        "a layer that is rearranged by one of its own tensors shows other places for other values"
    ),
    "no load makes it again": "a reload that does not process the layer again looks the same",
    "whether it is a constant cannot be tested": "no load of everything is possible",
    "on which tensors is unknown": (
        "loading one tensor alone does not bring what is derived from several; the layers of a "
        "tensor that the loader registers or looks at are not known"
    ),
    "the layers it is loaded into are unknown": (
        "a loader that looks at bits, or registers what it loads into"
    ),
    "the engine dropped its tensor": (
        "a tensor that the loader registers is gone when its layer is loaded without it"
    ),
    "the engine keeps it nowhere, but": (
        "a full load is not exact, or not possible, for the sake of other tensors"
    ),
    "were not loaded": "a loader that wants all tensors at once, of which some have no group",
    "changed": "the loader adds up or alternates: only raw layers are loaded right",
    "no engine": "its loader raises as the engine starts",
    "a kernel is missing": "the engine's other way raises, and this one needs to be confirmed",
}


def unexplained(refused: Mapping[str, str]) -> dict[str, str]:
    return {n: why for n, why in refused.items() if not any(part in why for part in KNOWN)}


KINDS: Final[Mapping[str, Callable[[int], Recipe]]] = {
    "loaders": loaders,
    "modules": modules,
    "shares": shares,
}

MORE: Final = 6


def examine(kind: str, seed: int, folder: Path) -> str:
    """What is wrong with one engine; empty if nothing is."""
    recipe = KINDS[kind](seed)
    outcome = run(recipe, folder)
    if not is_bad(recipe, outcome, folder):
        return ""
    least = shrunk(recipe, lambda one: _same_fault(outcome, one, folder))
    return f"{kind} {seed}, at the least:\n{least}\n{told(least, run(least, folder), folder)}"


def is_bad(recipe: Recipe, outcome: Outcome, folder: Path) -> bool:
    return outcome.is_fault or bool(needless(recipe, outcome, folder))


def needless(recipe: Recipe, outcome: Outcome, folder: Path) -> dict[str, str]:
    if outcome.is_fault or not unexplained(outcome.refused):
        return {}
    return Alternatives(recipe, folder).needless(outcome.refused)


def _same_fault(outcome: Outcome, recipe: Recipe, folder: Path) -> bool:
    found = run(recipe, folder)
    if not outcome.is_fault:
        return not found.is_fault and bool(needless(recipe, found, folder))
    pairs = ((outcome.wrong, found.wrong), (outcome.damaged, found.damaged))
    return all(bool(one) == bool(other) for one, other in (*pairs, (outcome.broke, found.broke)))


def shrunk(recipe: Recipe, holds: Callable[[Recipe], bool]) -> Recipe:
    while True:
        found = next((one for one in smaller(recipe) if _tried(holds, one)), None)
        if found is None:
            return recipe
        recipe = found


def _tried(holds: Callable[[Recipe], bool], recipe: Recipe) -> bool:
    try:
        return holds(recipe)
    except Exception:  # noqa: BLE001 - no engine can be made of it
        return False


def told(recipe: Recipe, outcome: Outcome, folder: Path) -> str:
    faults = {"wrong": outcome.wrong, "damaged": outcome.damaged, "raised": outcome.broke}
    lines = [f"{kind}: {one[:300]}" for kind, found in faults.items() for one in found[:MORE]]
    for name, way in needless(recipe, outcome, folder).items():
        lines.append(f"needless: {name} could be {way}")
    lines += [f"class of {name}: {kind}" for name, kind in outcome.classes.items()]
    lines += [f"refused {name}: {why}" for name, why in outcome.refused.items()]
    return "\n".join(lines)
