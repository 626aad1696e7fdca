"""Random engines: never served wrong, never damaged, refused only where no way exists."""

import logging
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import pytest
import torch
from torch import Tensor

from deltachain.replica import moved_tensors
from deltachain.replica.layout import derived, discover, loaded_checkpoint, reloads
from deltachain.replica.layout import in_place as read_back
from deltachain.replica.layout import loaded_checkpoint as other_bits
from deltachain.replica.layout.derived import _Search, find_derived
from deltachain.replica.layout.findings import Findings
from deltachain.replica.layout.model_state import LoadGroup, LoadMethod, ModelState, load_with
from deltachain.replica.layout.module_members import Members, MemoryIndex
from deltachain.replica.layout.reloads import Trial, _Seen
from deltachain.replica.moved_tensors import LateTies
from tests.property import trial_run
from tests.property.engine import RandomEngine
from tests.property.layers import Layer, first, other
from tests.property.recipe import OPAQUE, PURE, Recipe, Unit, loaders, modules, shares
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
    if not outcome.is_fault and not needless(recipe, outcome, folder):
        return ""
    return f"{kind} {seed}:\n{recipe}\n{told(recipe, outcome, folder)}"


def needless(recipe: Recipe, outcome: Outcome, folder: Path) -> dict[str, str]:
    if outcome.is_fault or not unexplained(outcome.refused):
        return {}
    return Alternatives(recipe, folder).needless(outcome.refused)


def told(recipe: Recipe, outcome: Outcome, folder: Path) -> str:
    faults = {"wrong": outcome.wrong, "damaged": outcome.damaged, "raised": outcome.broke}
    lines = [f"{kind}: {one[:300]}" for kind, found in faults.items() for one in found[:MORE]]
    for name, way in needless(recipe, outcome, folder).items():
        lines.append(f"needless: {name} could be {way}")
    lines += [f"class of {name}: {kind}" for name, kind in outcome.classes.items()]
    lines += [f"refused {name}: {why}" for name, why in outcome.refused.items()]
    return "\n".join(lines)


Switch: TypeAlias = Callable[[pytest.MonkeyPatch], None]


def _nothing(*_: object, **__: object) -> None: ...


def _none(*_: object, **__: object) -> frozenset[str]:
    return frozenset()


def _unchanged(*context: object) -> object:
    return context[-1]


def _skip(step: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(discover, step, _unchanged)


def _off(owner: Any, name: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(owner, name, _nothing)


def _empty(owner: Any, name: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(owner, name, _none)


def _own_change(patch: pytest.MonkeyPatch) -> None:
    def judge(seen: _Seen, _name: str, group: LoadGroup, *_: object) -> str:
        seen.left.discard(group.names[0])
        return ""

    patch.setattr(_Seen, "_judge", judge)


def _alone(patch: pytest.MonkeyPatch) -> None:
    load = Trial._load

    def together(trial: Trial, groups: Iterable[LoadGroup], others: Iterable[str] = ()) -> None:
        groups = list(groups)
        load(trial, groups, [n for g in groups for n in g.names] if [*others] else ())

    def at_once(
        _: Trial, groups: Sequence[LoadGroup], watch: _Seen, before: ModelState
    ) -> ModelState:
        watch.look({name: group for group in groups for name in group.names})
        return before

    patch.setattr(Trial, "_load", together)
    patch.setattr(Trial, "_look_at_each", at_once)


def _opaque(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModelState, "opaque", frozenset())


def _where(patch: pytest.MonkeyPatch) -> None:
    def alike(tensor: Tensor, turn: int = 0) -> Tensor:
        return tensor * (2 + turn) + 1 if tensor.is_floating_point() else tensor ^ (1 + turn)

    patch.setattr(other_bits, "other_bits", alike)
    patch.setattr(loaded_checkpoint, "other_bits", alike)


def _uniform(patch: pytest.MonkeyPatch) -> None:
    _skip("verify_uniform", patch)
    patch.setattr(Trial, "lost", _none)


def _halves(patch: pytest.MonkeyPatch) -> None:
    """Groups are loaded all at once."""
    patch.setattr(reloads, "separating", lambda _: [])
    patch.setattr(reloads, "crossing", lambda groups: ([groups], [groups]))


def _turns(patch: pytest.MonkeyPatch) -> None:
    """Groups of one layer are tried at once."""
    patch.setattr(
        reloads, "_without_common_layers", lambda groups: [list(groups)] if groups else []
    )


def _kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trial, "write_untouched", _nothing)
    patch.setattr(Trial, "lost", _none)


def _ties(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryIndex, "overlapping", _none)
    patch.setattr(MemoryIndex, "tied", lambda _, names: names)


def _read_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(read_back, "holds_bits", lambda *_: True)
    patch.setattr(reloads, "holds_bits", lambda *_: True)


def _strayed(patch: pytest.MonkeyPatch) -> None:
    doubt = reloads._doubt

    def without(state: ModelState, outcome: reloads.Outcome, group: LoadGroup) -> str:
        return doubt(state, replace(outcome, moved=frozenset()), group)

    patch.setattr(reloads, "_doubt", without)


def _made(patch: pytest.MonkeyPatch) -> None:
    def find(state: ModelState, findings: Findings) -> Findings:
        return replace(find_derived(state, findings), derived={})

    patch.setattr(discover, "find_derived", find)


def _confirmed(patch: pytest.MonkeyPatch) -> None:
    """What a reload leaves out is taken to be of no use."""
    patch.setattr(reloads, "_unconfirmed", lambda *_: "")


def _nearby(patch: pytest.MonkeyPatch) -> None:
    affected = _Search.affected
    patch.setattr(_Search, "affected", lambda search, names, **_: affected(search, names))


def tryable_modules(seed: int) -> Recipe:
    """An engine with layers that are packed, tied, derived, and can be tried where they hide."""
    recipe = modules(seed)
    units = (replace(one, tryable=one.tryable or one.process in OPAQUE) for one in recipe.units)
    return replace(recipe, units=tuple(units))


HIDDEN: Final = Recipe(units=(Unit(process="pack"),))

INTO: Final = Recipe(units=(Unit(process="into"), Unit()))


def _repeatable(patch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded again."""
    patch.setattr(reloads, "separating", lambda _: [])
    patch.setattr(reloads, "some_of_each", lambda *_: [])


ROWS: Final = Recipe(units=(Unit(process="derive", rows=(3,)),), reload="first rows")

TIED: Final = Recipe(units=(Unit(), Unit(tie=0, process="first")))

EXPERTS: Final = Unit(
    styles=("copy",) * 96, rows=(2,) * 96, layout="experts", process="flip", tryable=True
)

ONE_EXPERT: Final = Recipe(units=(EXPERTS,), reload="first rows", repack="absent")
"""Its reload loads the first of the experts alone."""


def _unshown(patch: pytest.MonkeyPatch) -> None:
    """What happens to units in the loads of sets is not looked at."""
    patch.setattr(_Seen, "unseen", lambda seen, one, *_: seen.left.discard(one.names[0]) or [])


def _at_once(patch: pytest.MonkeyPatch) -> None:
    """All tensors of a large group get other bits together."""
    patch.setattr(reloads, "sets_of_kinds", lambda names: [[list(names)]])


FEW: Final[dict[str, tuple[Switch, Recipe]]] = {
    "its own change is followed": (_own_change, loaders(945)),
    "the change back is followed": (partial(_off, ModelState, "expect_same"), loaders(6)),
    "members are put back": (partial(_off, Members, "put_back"), loaders(0)),
    "what is derived is found": (partial(_skip, "find_derived"), tryable_modules(76)),
    "what is kept as one stays equal": (partial(_off, LateTies, "check"), shares(12)),
    "each of many tensors is shown": (_unshown, ONE_EXPERT),
    "many tensors are told apart": (_at_once, ONE_EXPERT),
    "slots that move are seen": (
        lambda patch: patch.setattr(moved_tensors, "slots_of", lambda *_: {}),
        shares(0),
    ),
    "equal matrices are kept as one, too": (partial(_off, LateTies, "check"), shares(20)),
}
"""Switches, and an engine that is then followed wrong or damaged, by what they switch off."""

MORE_SWITCHES: Final[dict[str, tuple[Switch, Recipe]]] = {
    "a neighbour's change proves nothing": (_alone, tryable_modules(2499)),
    "other bits show where they go": (_where, loaders(23)),
    "groups are loaded apart": (_halves, loaders(86)),
    "loading is repeatable": (_repeatable, loaders(23)),
    "groups of one layer take turns": (_turns, tryable_modules(889)),
    "what is not loaded keeps other bits": (_kept, loaders(3330)),
    "live bits are read back": (_read_back, tryable_modules(1065)),
    "equal elements keep their placement": (_uniform, loaders(85)),
    "layers compute from it": (partial(_skip, "verify_in_place"), tryable_modules(219)),
    "equal elements prove no placement": (
        partial(_skip, "refuse_unverifiable"),
        tryable_modules(116),
    ),
    "layers that cannot be inspected are refused": (partial(_skip, "find_untestable"), HIDDEN),
    "ties are followed": (_ties, TIED),
    "what is derived follows": (_made, tryable_modules(194)),
    "a constant was made again": (partial(_off, _Search, "expect_made"), tryable_modules(255)),
    "a constant stays when the same is loaded": (
        partial(_off, _Search, "expect_stable"),
        loaders(207),
    ),
    "what a reload leaves out is confirmed": (_confirmed, tryable_modules(994)),
    "what is read after a swap can be": (
        partial(_empty, reloads, "_displaced"),
        loaders(10501),
    ),
    "what is opaque is not loaded": (_opaque, INTO),
    "what a load changes beside is followed": (
        partial(_off, _Seen, "_expect_followed"),
        tryable_modules(1472),
    ),
    "what is unused is stored nowhere": (
        lambda patch: patch.setattr(derived, "_held", lambda *_: {}),
        loaders(19581),
    ),
    "everything is loaded once": (_nearby, tryable_modules(1041)),
    "other bits arrive where they were recorded": (_strayed, ROWS),
    "outputs are restored": (partial(_off, discover, "restore_outputs"), tryable_modules(1798)),
}

SETTLE: Final = partial(_off, Members, "settle")
"""Tensors do not keep their places: engines are refused that can be followed."""


def expect_missed(switch: Switch, recipe: Recipe, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        switch(patch)
        assert run(recipe, folder).is_fault, "without the check"
    assert not run(recipe, folder).is_fault, "with it"


@pytest.mark.parametrize("check", FEW)
def test_a_check_that_is_left_out_is_missed(check: str, tmp_path: Path) -> None:
    expect_missed(*FEW[check], tmp_path / "engine")


@pytest.mark.slow
@pytest.mark.parametrize("check", MORE_SWITCHES)
def test_each_check_that_is_left_out_is_missed(check: str, tmp_path: Path) -> None:
    expect_missed(*MORE_SWITCHES[check], tmp_path / "engine")


def test_engines_that_replace_tensors_are_followed_because_those_are_settled(
    tmp_path: Path,
) -> None:
    unit = Unit(styles=("new parameter",))
    recipe = Recipe(units=(unit,), reload="absent", repack="absent")
    assert not run(recipe, tmp_path / "engine").refused
    with pytest.MonkeyPatch.context() as patch:
        SETTLE(patch)
        assert run(recipe, tmp_path / "engine").refused


@pytest.mark.parametrize("repack", ["right", "absent"])
@pytest.mark.parametrize("reload", ["right", "unprocessed"])
def test_a_layer_of_many_tensors_is_loaded_a_few_times(
    reload: str, repack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is found that no load restores it, before tensors are looked at alone."""
    recipe = Recipe(units=(EXPERTS, Unit()), reload=reload, repack=repack)
    loads, load_into = [], RandomEngine.load_into

    def counted(engine: RandomEngine, *given: Any) -> set[str]:
        loads.append(1)
        return load_into(engine, *given)

    monkeypatch.setattr(RandomEngine, "load_into", counted)
    outcome = run(recipe, tmp_path / "engine")
    assert not outcome.is_fault
    assert bool(outcome.refused) == (reload == "unprocessed" and repack == "absent")
    assert len(loads) < len(EXPERTS.rows)


@pytest.mark.parametrize("kind", ["modules", "modules in parts"])
def test_tensors_keep_their_places_and_views_of_them_follow(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader makes a tensor of another layer anew; a kernel views weights that are loaded."""
    recipe = KINDS["modules"](60098)
    if kind == "modules in parts":
        recipe = KINDS["modules"](50030)
        for module in (derived, reloads):
            monkeypatch.setattr(module, "PART", 1)
    outcome = run(recipe, tmp_path / "engine")
    assert not outcome.is_fault
    assert not outcome.refused


@pytest.mark.parametrize("seed", [210084, 210129, 210296])
def test_parts_of_a_model_are_restored_by_the_loads_that_were_proven(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repack raises midway, once what the layer computes with is no longer kept.

    It may lose a bias that no output shows; a reload of a weight without it does nothing.
    """
    for module in (derived, reloads):
        monkeypatch.setattr(module, "PART", 1)
    monkeypatch.setattr(
        trial_run, "_kept", lambda one, other: differences(served(one), served(other))
    )
    assert not run(modules(seed), tmp_path / "engine").is_fault


COUNTS = {"loaders": 20_000, "modules": 2_000, "shares": 1_000}

SOME = 300

BLOCK = 25
"""Engines that a process examines at a time."""

SHARE = 1000
"""Engines of one case of the many."""

MANY = [(kind, 1000 + at) for kind, count in COUNTS.items() for at in range(0, count, SHARE)]


LEAST: Final = {"loaders": 0.6, "modules": 0.2, "shares": 0.2}
"""Share of the engines that is followed, at least: who refuses everything is never wrong either."""


TELLS: Final = "python -m tests.property loaders|modules|shares SEED tells more"


class Tally(NamedTuple):
    faults: tuple[int, ...]
    followed: int


@contextmanager
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def tally(kind: str, first: int) -> Tally:
    with quiet(), tempfile.TemporaryDirectory() as scratch:
        seeds = range(first, first + BLOCK)
        found = {seed: run(KINDS[kind](seed), Path(scratch) / "engine") for seed in seeds}
    return Tally(
        faults=tuple(seed for seed, outcome in found.items() if outcome.is_fault),
        followed=sum(not outcome.refused for outcome in found.values()),
    )


def block(kind: str, first: int) -> list[str]:
    with quiet(), tempfile.TemporaryDirectory() as scratch:
        found = [examine(kind, first + n, Path(scratch) / "engine") for n in range(BLOCK)]
    return [one for one in found if one]


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, SOME, BLOCK))
def test_some_random_loaders_are_never_followed_wrong_nor_damaged(first: int) -> None:
    found = tally("loaders", first)
    assert not found.faults, TELLS
    assert found.followed >= LEAST["loaders"] * BLOCK


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 50, BLOCK))
def test_engines_that_share_or_move_weights_are_never_followed_wrong(first: int) -> None:
    found = tally("shares", first)
    assert not found.faults, TELLS
    assert found.followed >= LEAST["shares"] * BLOCK


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, BLOCK))
def test_random_loaders_are_followed_right_or_refused(first: int) -> None:
    assert not "\n\n".join(block("loaders", first))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100, BLOCK))
def test_random_modules_are_followed_right_or_refused(first: int) -> None:
    assert not "\n\n".join(block("modules", first))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "first"), MANY)
def test_many_random_engines_are_never_followed_wrong_nor_damaged(kind: str, first: int) -> None:
    spawn = multiprocessing.get_context("spawn")
    blocks = range(first, first + SHARE, BLOCK)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        found = list(pool.map(tally, [kind] * len(blocks), blocks))
    faults = [seed for one in found for seed in one.faults]
    assert not faults, TELLS
    assert sum(one.followed for one in found) > LEAST[kind] * SHARE
