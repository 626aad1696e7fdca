"""One random engine followed through a few versions, with a freshly loaded one as the judge."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from deltachain import errors
from deltachain.delta import TensorDelta
from deltachain.format.keys import digest_key
from deltachain.kernels import host
from deltachain.replica.layout.classes import agree, orphans
from deltachain.replica.rank import Rank
from deltachain.torch_names import WIRE_NAMES
from deltachain.types import BITS_DTYPES, Bits, StateDigest, TensorSpec
from tests.property.engine import RandomEngine
from tests.property.layers import Packed, are_parted, first, later
from tests.property.recipe import Recipe
from tests.support.spools import spool_of

LOADER = "loader_"
"""What a loader keeps for itself on a module: nothing is computed from it."""


class Seen(NamedTuple):
    served: object
    kept: object


def look(engine: RandomEngine) -> dict[str, Seen]:
    found: dict[str, Seen] = {}
    names = [*engine.modules().items()]
    found["modules"] = Seen([name for name, _ in names], [id(module) for _, module in names])
    for name, module in names:
        found.update(_walk(name, vars(module), set()))
    return found


def served(seen: dict[str, Seen]) -> dict[str, object]:
    return {
        path: one.served
        for path, one in seen.items()
        if f".{LOADER}" not in path and one.served is not None
    }


def addresses(engine: RandomEngine) -> dict[str, tuple[int, int]]:
    return {name: (id(t), t.data_ptr()) for name, t in engine.tensors().items()}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [
        f"{path}: {_short(one.get(path))} / {_short(other.get(path))}"
        for path in sorted(one.keys() | other.keys())
        if path not in one or path not in other or one[path] != other[path]
    ]


def _short(thing: object) -> str:
    return repr(thing)[:900]


def _walk(path: str, value: Any, inside: set[int]) -> Iterator[tuple[str, Seen]]:
    if isinstance(value, Tensor):
        yield path, _tensor(value)
        if vars(value):
            yield from _walk(f"{path}@", vars(value), inside)
        return
    if isinstance(value, nn.Module | type) or value is None:
        yield path, Seen(None, id(value))
        return
    if isinstance(value, bool | int | float | str | bytes):
        yield path, Seen(value, value)
        return
    if id(value) in inside:
        return
    inside = inside | {id(value)}
    items = _items(value)
    yield path, Seen(None, (id(value), None if items is None else [str(key) for key in items]))
    for key, held in (items or {}).items():
        yield from _walk(f"{path}.{key}", held, inside)


def _items(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, set | frozenset):
        return {repr(held): held for held in sorted(value, key=repr)}
    if isinstance(value, Packed):
        return {"weight": value.weight, "bias": value.bias}
    if isinstance(value, FunctionType):
        cells = value.__closure__ or ()
        return {number: cell.cell_contents for number, cell in enumerate(cells)}
    return vars(value) if hasattr(value, "__dict__") else None


def _tensor(tensor: Tensor) -> Seen:
    data = tensor.detach()
    bits = b"" if data.is_meta else data.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    content = str(data.dtype), tuple(data.shape), str(data.device), bits
    return Seen(content, (id(tensor), data.data_ptr(), data.stride(), content))


BUDGET = 1 << 30


@dataclass
class Outcome:
    """What became of a recipe."""

    classes: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    broke: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    @property
    def is_told(self) -> bool:
        return "restart the engine" in self.refused.get("*", "")

    @property
    def is_fault(self) -> bool:
        return bool(self.wrong or self.damaged or self.broke)


@dataclass
class Stage:
    recipe: Recipe
    folder: Path
    engines: list[RandomEngine]
    base: dict[str, Tensor]
    specs: dict[str, TensorSpec]
    outcome: Outcome


def run(recipe: Recipe, folder: Path) -> Outcome:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        base = first(recipe)
        save_file(base, folder / "model.safetensors")
        aliases = recipe.aliases()
        specs = {n: _spec(n, t) for n, t in base.items() if n not in aliases}
        try:
            engines = fresh(recipe, base, folder)
        except RuntimeError as exc:
            return Outcome(refused={"*": f"no engine: {exc}"})
        stage = Stage(recipe, folder, engines, base, specs, Outcome())
        _follow(stage)
        return stage.outcome
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fresh(recipe: Recipe, tensors: Mapping[str, Tensor], folder: Path) -> list[RandomEngine]:
    return [RandomEngine(recipe, rank, folder, tensors) for rank in range(recipe.ranks)]


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, WIRE_NAMES[tensor.dtype], tuple(tensor.shape))


def _follow(stage: Stage) -> None:
    before = [look(engine) for engine in stage.engines]
    ranks: list[Rank] = []
    for engine in stage.engines:
        try:
            ranks.append(Rank(engine, stage.specs.values(), stage.recipe.aliases()))
        except errors.DeltaChainError as exc:
            stage.outcome.refused["*"] = f"{type(exc).__name__}: {exc}"
        except Exception as exc:  # noqa: BLE001 - whatever it is, it must not be
            stage.outcome.broke.append(f"attaching raised {exc!r}")
    for engine, was in zip(stage.engines, before, strict=True):
        stage.outcome.damaged += _kept(was, look(engine)) if not stage.outcome.is_told else []
    if len(ranks) < len(stage.engines) or stage.outcome.damaged:
        return
    _settle_on_classes(stage, ranks)
    for engine, was in zip(stage.engines, before, strict=True):
        stage.outcome.damaged += _kept(was, look(engine)) if not stage.outcome.is_told else []
    if not stage.outcome.refused and not stage.outcome.damaged:
        _Chain(stage, ranks).play()


def _settle_on_classes(stage: Stage, ranks: list[Rank]) -> None:
    reports = [rank.report() for rank in ranks]
    lost = orphans(stage.specs, reports)
    try:
        for number, rank in enumerate(ranks if lost else ()):
            reports[number] |= rank.find_unused(lost)
    except errors.DeltaChainError as exc:
        stage.outcome.refused["*"] = f"{type(exc).__name__}: {exc}"
        return
    agreement = agree(stage.specs.values(), reports)
    stage.outcome.classes = dict(agreement.classes)
    stage.outcome.refused = dict(agreement.refused)
    try:
        for number, rank in enumerate(ranks):
            holders = {name: who[number] for name, who in agreement.holders.items()}
            rank.agree(agreement.classes, holders)
    except errors.DeltaChainError as exc:
        stage.outcome.refused["*"] = f"{type(exc).__name__}: {exc}"


class _Chain:
    def __init__(self, stage: Stage, ranks: list[Rank]) -> None:
        self.stage, self.ranks = stage, ranks
        aliases, refused = stage.recipe.aliases(), stage.outcome.refused.keys()
        self.fixed = frozenset(refused) | {a for a, name in aliases.items() if name in refused}
        out = ("refused", "unused")
        self.kept = [n for n in stage.specs if stage.outcome.classes[n] not in out]
        self.at = [addresses(engine) for engine in stage.engines]

    def play(self) -> None:
        base, recipe = self.stage.base, self.stage.recipe
        one = later(recipe, base, 1, self.fixed)
        two = later(recipe, one, 2, self.fixed)
        steps = [(1, base, one, False), (1, base, one, True), (2, base, two, False)]
        for ticket, old, new, back in steps:
            if ticket == 2 and recipe.moves:
                for engine in self.stage.engines:
                    engine.move()
            if self.stage.outcome.is_fault or not (back or self._stage(ticket, old, new)):
                return
            self._swap(ticket, back=back)
            self._judge(f"version {ticket}{' taken back' * back}", old if back else new)
        for rank in self.ranks:
            if not self.stage.outcome.is_fault and not rank.loads_the_same():
                self.stage.outcome.wrong.append("loading the same again is not the same")
        if not self.stage.outcome.is_fault:
            self._judge("version 2 loaded again", two)

    def _stage(self, ticket: int, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> bool:
        spool = spool_of(self.stage.folder / "spool", _deltas(self.stage.specs, old, new))
        outcome = self.stage.outcome
        for rank in self.ranks:
            try:
                rank.check_addresses()
                rank.stage(ticket, spool.folder, BUDGET)
            except (errors.TensorMismatchError, errors.BaseMismatchError) as exc:
                is_mine = self.stage.recipe.moves or are_parted(self.stage.recipe, new)
                (outcome.told if is_mine else outcome.broke).append(str(exc))
        if outcome.told and not self.stage.recipe.moves:
            self._judge("a version that was refused", old)
        if not outcome.told:
            self._stumble(ticket, old)
        return not outcome.told

    def _stumble(self, ticket: int, old: Mapping[str, Tensor]) -> None:
        if not self.stage.recipe.trips or self.stage.outcome.is_fault:
            return
        for rank, engine in zip(self.ranks, self.stage.engines, strict=True):
            engine.trip = 1 + self.stage.recipe.seed % 3
            try:
                rank.swap(ticket, ticket, back=False)
            except errors.PartialApplyError:
                engine.trip = -1
            except Exception as exc:  # noqa: BLE001 - whatever it is, it must not be
                self.stage.outcome.broke.append(f"a swap that failed raised {exc!r}")
                return
            engine.trip = -1
        self._swap(ticket, back=True)
        self._judge("a swap that failed", old)

    def _swap(self, ticket: int, *, back: bool) -> None:
        for rank in self.ranks:
            try:
                rank.swap(ticket, ticket, back=back)
            except Exception as exc:  # noqa: BLE001 - whatever it is, it must not be
                self.stage.outcome.broke.append(f"swap raised {exc!r}")

    def _judge(self, when: str, tensors: Mapping[str, Tensor]) -> None:
        outcome = self.stage.outcome
        if outcome.broke:
            return
        wanted = fresh(self.stage.recipe, tensors, self.stage.folder)
        for engine, other, at in zip(self.stage.engines, wanted, self.at, strict=True):
            wrong = differences(served(look(engine)), served(look(other)))
            outcome.wrong += [f"{when}: {one}" for one in wrong]
            moved = differences(at, addresses(engine))
            outcome.damaged += [f"{when}, moved: {one}" for one in moved]
        if self._digest() != self._wanted(tensors):
            outcome.wrong.append(f"{when}: the state digest")

    def _digest(self) -> StateDigest | None:
        """As the leader adds it up; none where holders of the same elements hold different bits."""
        lanes: dict[str, StateDigest] = {}
        for rank in self.ranks:
            for (label, _), digest in rank.state().items():
                if lanes.setdefault(label, digest) != digest:
                    return None
        return sum(lanes.values(), StateDigest())

    def _wanted(self, tensors: Mapping[str, Tensor]) -> StateDigest:
        return sum(
            (host.digest(digest_key(self.stage.specs[n]), bits_of(tensors[n])) for n in self.kept),
            StateDigest(),
        )


def _kept(before: dict[str, Seen], after: dict[str, Seen]) -> list[str]:
    one = {path: seen.kept for path, seen in before.items()}
    return differences(one, {path: seen.kept for path, seen in after.items()})


def bits_of(tensor: Tensor) -> Bits:
    flat = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    found: Bits = flat.view(BITS_DTYPES[tensor.element_size()])
    return found


def _deltas(
    specs: Mapping[str, TensorSpec], before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> Iterator[TensorDelta]:
    for number, (name, spec) in enumerate(specs.items()):
        old, new = bits_of(before[name]), bits_of(after[name])
        indices = np.flatnonzero(old != new)
        if not indices.size:
            continue
        if number % 3 == 2:
            yield TensorDelta.dense(spec, new)
            continue
        mask = np.arange(indices.size) % 2 == number % 3
        values = np.where(mask, new[indices], new[indices] - old[indices])
        yield TensorDelta(spec=spec, indices=indices, values=values, absolute=mask)
