"""One random engine examined: what is wrong with how it is followed, told with the least recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from tests.property.alternatives import Alternatives
from tests.property.generate import loaders, modules, shares, smaller
from tests.property.recipe import Recipe
from tests.property.refusals import unexplained
from tests.property.trial_run import Outcome, run

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
