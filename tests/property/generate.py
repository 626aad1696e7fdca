"""Random recipes: each a function of its seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final

from tests.property.recipe import PROCESSES, RELOADS, REPACKS, Recipe, Unit
from tests.property.writers import COMPUTED, PURE, REPLACING, STATEFUL

PLACES: Final = ("attribute", "list", "dictionary", "method", "buffer")
KEPT: Final = ("", "nothing", "pack", "derive")
"""Processes after which the weight is what was loaded."""
OPAQUE: Final = ("pack", "empty", "delete", "prepack", "first", "into", "alias")
"""Processes that hide what is computed from."""
CONSTANTS: Final = ("parameter", "buffer", "attribute", "by process")


def loaders(seed: int) -> Recipe:
    """An engine of one to three layers, nothing of which is changed after loading."""
    random = Random(f"loaders {seed}")
    units = [_unit(random, "") for _ in range(random.choice((1, 1, 2, 3)))]
    units[0] = replace(units[0], only=-1)
    return Recipe(
        seed=seed,
        units=tuple(units),
        ranks=random.choice((1, 1, 1, 2)),
        loader=random.choice(("plain", "plain", "plain", "strict", "quiet")),
        reload=random.choice(("right", "right", *RELOADS)),
        repack=random.choice(("right", *REPACKS)),
        share=random.choice((1.0, 1.0, 0.5)),
        trips=random.random() < 0.1,
    )


def modules(seed: int) -> Recipe:
    """An engine of two to five layers that are packed, tied, derived from one another."""
    random = Random(f"modules {seed}")
    units = [_unit(random, random.choice(PROCESSES)) for _ in range(random.randint(1, 3))]
    units[0] = replace(units[0], only=-1)
    for _ in range(random.randint(0, 2)):
        units.append(_relative(random, units))
    if all(unit.process in ("empty", "delete") for unit in units if unit.only < 0):
        units.append(Unit())  # no engine is without a single tensor
    return Recipe(
        seed=seed,
        units=tuple(units),
        ranks=random.choice((1, 1, 1, 2)),
        loader=random.choice(("plain", "plain", "plain", "plain", "strict", "quiet")),
        reload=random.choice(("right", "right", "right", *RELOADS)),
        repack=random.choice(("right", "right", *REPACKS)),
        share=random.choice((1.0, 0.5)),
        trips=random.random() < 0.1,
    )


def shares(seed: int) -> Recipe:
    """An engine with weights that it keeps as one if they are equal, or stacked ones that move."""
    random = Random(f"shares {seed}")
    if random.random() < 0.4:
        styles = tuple(random.choice(sorted(PURE)) for _ in range(random.choice((2, 3))))
        process = random.choice(("", "nothing", "prepack", "derive"))
        stack = Unit(
            styles=styles, rows=(2,) * len(styles), layout="experts", process=process, tryable=True
        )
        return Recipe(seed=seed, units=(stack, Unit()), share=0.5, moves=True)
    base = replace(_unit(random, random.choice(("", "nothing", "derive"))), equal=-1)
    base = replace(base, only=-1, shadow="", collect="", scale=False, draft=False, tryable=True)
    kinds = {n: getattr(base, n) for n in ("styles", "rows", "cols", "layout", "shard")}
    kinds |= {n: getattr(base, n) for n in ("stored", "live", "padded")}
    heads = [
        Unit(**kinds, equal=0, tryable=True, process=random.choice(("", "nothing", "pack")))
        for _ in range(random.choice((1, 1, 2)))
    ]
    return Recipe(
        seed=seed,
        units=(base, *heads),
        ranks=random.choice((1, 1, 2)),
        reload=random.choice(("right", "right", *RELOADS)),
        repack=random.choice(("right", "right", *REPACKS)),
    )


def _style(random: Random) -> str:
    kind = random.choices((PURE, COMPUTED, STATEFUL), (5, 4, 1))[0]
    return random.choice(sorted(kind))


def _unit(random: Random, process: str) -> Unit:
    count = random.choice((1, 1, 1, 2, 3))
    layout = random.choice(("rows", "rows", "interleaved", "transposed", "experts"))
    styles = tuple(_style(random) for _ in range(count))
    if count == 1 and layout == "rows" and random.random() < 0.15:
        styles = (random.choice(sorted(REPLACING)),)
    rows = random.randint(2, 4)
    stored = random.choice(("bfloat16", "bfloat16", "float16", "float32"))
    parts = [*(f"w{at}" for at in range(count)), "bias", "scale"]
    unit = Unit(
        styles=styles,
        rows=(rows,) * count,
        cols=random.choice((rows, 3, 4, 6)),
        layout=layout,
        shard=random.choice(("", "", "rows", "cols")),
        only=random.choice((-1, -1, -1, -1, 0, 1)),
        stored=stored,
        live="float32" if random.random() < 0.15 else stored,
        flat=frozenset(part for part in parts if random.random() < 0.2),
        process=process,
        place=random.choice(PLACES),
        hides_bias=random.random() < 0.5,
        tryable=random.random() < 0.8,
        late=random.random() < 0.1,
        skipped=random.random() < 0.1,
        alias=random.random() < 0.05,
        draft=process in KEPT and random.random() < 0.08,
        constants=tuple(c for c in CONSTANTS if random.random() < 0.08),
    )
    return _with_more(random, unit)


def _with_more(random: Random, unit: Unit) -> Unit:
    more: dict[str, Any] = {}
    if unit.layout == "rows":
        more["padded"] = random.random() < 0.15
    if random.random() < 0.4 and unit.layout != "experts" and not more.get("padded"):
        more["bias"] = _style(random)
        more["bias_late"] = random.random() < 0.15
    if len(unit.styles) > 1 and random.random() < 0.25:
        more["collect"] = random.choice(("local", "module", "closure"))
        more["styles"] = (unit.styles[0],) * len(unit.styles)
    elif random.random() < 0.1:
        more["shadow"] = random.choice(("before", "after", "alias"))
    if unit.process == "dequantize":
        more |= {
            "stored": "int8",
            "live": "int8",
            "shadow": "",
            "styles": ("copy",) * len(unit.rows),
        }
        more["bias"] = ""
    if random.random() < 0.1:
        more["scale"] = True
    return replace(unit, **more)


def _relative(random: Random, units: Sequence[Unit]) -> Unit:
    process = random.choice(("", "pack", "empty", "delete", "first", "alias", "derive", "nothing"))
    bases = [n for n, unit in enumerate(units) if unit.process in KEPT and unit.tie < 0]
    own = _unit(random, process)
    if not bases:
        return own
    at = random.choice([n for n in bases if units[n].twin < 0] or bases)
    base = units[at]
    shared = replace(
        own,
        rows=base.rows,
        cols=base.cols,
        shard=base.shard,
        only=base.only,
        stored=base.stored,
        bias="",
        bias_late=False,
        skipped=False,
        scale=False,
        shadow="",
        collect="",
        constants=(),
        draft=False,
        tryable=own.tryable or process in OPAQUE,
    )
    if random.random() < 0.3 and base.twin < 0:
        styles = tuple(_style(random) for _ in base.rows)
        return replace(shared, twin=at, styles=styles, live=base.live, padded=False)
    if base.twin >= 0:
        return own
    return replace(
        shared,
        tie=at,
        tie_kind=random.choice(("same", "same", "data", "view")),
        styles=base.styles,
        layout=base.layout,
        live=base.live,
        padded=base.padded,
    )


def smaller(recipe: Recipe) -> Iterator[Recipe]:
    """Recipes with one feature less each, the largest cuts first."""
    for number in reversed(range(len(recipe.units))):
        left = _without(recipe.units, number)
        if left:
            yield replace(recipe, units=left)
    usual = Recipe(units=recipe.units)
    for name in ("trips", "share", "ranks", "loader", "reload", "repack"):
        if getattr(recipe, name) != getattr(usual, name):
            yield replace(recipe, **{name: getattr(usual, name)})
    for number, unit in enumerate(recipe.units):
        for less in _plainer(unit):
            units = list(recipe.units)
            units[number] = less
            yield replace(recipe, units=_matched(units))


def _without(units: tuple[Unit, ...], number: int) -> tuple[Unit, ...]:
    left = []
    for at, unit in enumerate(units):
        if at == number or number in (unit.tie, unit.twin, unit.equal):
            continue
        tie, twin = unit.tie - (unit.tie > number), unit.twin - (unit.twin > number)
        equal = unit.equal - (unit.equal > number)
        left.append(replace(unit, tie=tie, twin=twin, equal=equal))
    return tuple(left)


def _matched(units: Sequence[Unit]) -> tuple[Unit, ...]:
    found = []
    for unit in units:
        base = units[max(unit.tie, unit.twin)] if max(unit.tie, unit.twin) >= 0 else unit
        shape = {n: getattr(base, n) for n in ("rows", "cols", "shard", "only", "stored")}
        if unit.tie >= 0:
            shape |= {n: getattr(base, n) for n in ("styles", "layout", "live", "padded")}
        elif unit.twin >= 0:
            shape["styles"] = unit.styles[: len(base.rows)]
        related = max(unit.tie, unit.twin) >= 0
        shape["tryable"] = unit.tryable or (related and unit.process in OPAQUE)
        found.append(replace(unit, **shape))
    return tuple(found)


def _plainer(unit: Unit) -> Iterator[Unit]:
    usual = Unit()
    alone = unit.tie < 0 and unit.twin < 0
    if alone and len(unit.rows) > 1:
        yield replace(unit, rows=unit.rows[:1], styles=unit.styles[:1], collect="")
    shaping = {"rows", "styles", "tie", "twin", "cols", "stored", "live", "only", "shard", "padded"}
    for name in Unit.__dataclass_fields__:
        if name == "equal" or (unit.equal >= 0 and name in ("bias", "layout")):
            continue
        if name in shaping and not (alone and name in ("only", "shard", "padded")):
            continue
        if getattr(unit, name) != getattr(usual, name):
            yield replace(unit, **{name: getattr(usual, name)})
    if any(style != "copy" for style in unit.styles):
        yield replace(unit, styles=("copy",) * len(unit.styles))
