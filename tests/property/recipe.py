"""What a random engine is made of; printed, it is the description of a failure.

A unit is one layer: the tensors of a checkpoint that are fused into its weight, what else it has
beside the weight, how its loader writes all that, and what becomes of it after loading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any, Final, NamedTuple

from tests.property.writers import BLIND, PURE


class Source(NamedTuple):
    """One tensor of the checkpoint.

    Attributes:
        name: In the checkpoint.
        part: Of the layer: ``w0``, ``bias``, ``scale``, ``order`` and so on.
        shape: Of the whole tensor.
        dtype: As torch calls it.
        flat: Whether all its elements are the same at first.
        used: Whether anything that is served depends on it.
    """

    name: str
    part: str
    shape: tuple[int, ...]
    dtype: str
    flat: bool = False
    used: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One layer.

    Attributes:
        styles: How each tensor of the weight is written, one of ``WRITERS`` each.
        rows: Of the weight, for each of those; on one rank.
        cols: Of the weight; on one rank.
        layout: ``rows`` above each other, ``interleaved``, ``transposed``, or one of ``experts``.
        shard: Which dimension the ranks share: ``rows``, ``cols``, or none.
        only: The one rank that has it; -1 for all.
        padded: One more row, of zeros.
        stored: Dtype in the checkpoint.
        live: Dtype of the parameter.
        flat: Parts that are all alike at first.
        bias: How a bias is written; none if empty.
        bias_late: The loader registers the bias.
        scale: There is a scale, too.
        process: What is done after loading, one of ``PROCESSES``.
        place: Where what is derived or packed is kept.
        hides_bias: What is packed has the bias in it.
        tryable: Whether ``compute`` tells what it computes.
        collect: Where tensors wait for their partners: ``local``, ``module``, ``closure``.
        late: Written at the end of the load.
        shadow: ``before`` or ``after``: another tensor is loaded to where the first one is;
            ``alias``: another name of the first one is.
        skipped: There is one more tensor that the loader skips.
        draft: A draft model shares its weight.
        tie: Unit whose weight is this one's too; -1 for none.
        tie_kind: ``same`` parameter, another of the same ``data``, or a ``view`` of it.
        twin: Unit whose tensors are loaded into this one as well; -1 for none.
        equal: Unit whose weight it shares if they are equal as the engine starts; -1 for none.
        constants: What it has that comes from no checkpoint.
        alias: The module is there under a second name.
    """

    styles: tuple[str, ...] = ("copy",)
    rows: tuple[int, ...] = (2,)
    cols: int = 3
    layout: str = "rows"
    shard: str = ""
    only: int = -1
    padded: bool = False
    stored: str = "bfloat16"
    live: str = "bfloat16"
    flat: frozenset[str] = frozenset()
    bias: str = ""
    bias_late: bool = False
    scale: bool = False
    process: str = ""
    place: str = "attribute"
    hides_bias: bool = False
    tryable: bool = False
    collect: str = ""
    late: bool = False
    shadow: str = ""
    skipped: bool = False
    draft: bool = False
    tie: int = -1
    tie_kind: str = "same"
    twin: int = -1
    equal: int = -1
    constants: tuple[str, ...] = ()
    alias: bool = False

    @property
    def is_pure(self) -> bool:
        styles = (*self.styles, *([self.bias] if self.bias else ()))
        plain = not self.process and not self.collect and not self.bias_late
        return plain and self.stored == self.live and all(style in PURE for style in styles)

    @property
    def is_blind(self) -> bool:
        return not BLIND.isdisjoint((*self.styles, self.bias))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """An engine."""

    seed: int = 0
    units: tuple[Unit, ...]
    ranks: int = 1
    loader: str = "plain"
    reload: str = "right"
    repack: str = "right"
    share: float = 1.0
    trips: bool = False
    moves: bool = False

    def __str__(self) -> str:
        units = "\n".join(f"  {number}: {_unusual(unit)}" for number, unit in enumerate(self.units))
        return f"{_unusual(self, but='units')}\n{units}"

    def aliases(self) -> dict[str, str]:
        found = {}
        for number, unit in enumerate(self.units):
            if unit.shadow == "alias" and unit.tie < 0 and unit.twin < 0:
                found[f"model.{number}.z"] = f"model.{number}.w0"
        return found

    def sources(self) -> dict[str, Source]:
        found = [s for number, unit in enumerate(self.units) for s in sources(self, number, unit)]
        return {source.name: source for source in found}


PROCESSES: Final = (
    "",
    "nothing",
    "flip",
    "turn",
    "pack",
    "empty",
    "delete",
    "prepack",
    "first",
    "into",
    "alias",
    "quantize",
    "dequantize",
    "order",
    "unordered",
    "derive",
    "derive in load",
    "number",
    "maximum",
    "other",
)

RELOADS: Final = (
    "right",
    "untied",
    "nothing",
    "absent",
    "midway",
    "unprocessed",
    "without bias",
    "damaging",
    "replacing",
)

REPACKS: Final = ("right", "absent", "midway", "packed still")


def sources(recipe: Recipe, number: int, unit: Unit) -> Iterator[Source]:
    if unit.tie >= 0 or unit.twin >= 0:
        return
    prefix = f"model.{number}"
    tp = recipe.ranks if unit.only < 0 else 1
    for at, rows in enumerate(unit.rows):
        part = f"w{at}"
        shape: tuple[int, ...] = (rows * (tp if unit.shard == "rows" else 1),)
        shape += (unit.cols * (tp if unit.shard == "cols" else 1),)
        yield Source(f"{prefix}.{part}", part, shape, unit.stored, part in unit.flat)
        if at == 0 and unit.shadow:
            name = f"{prefix}.a" if unit.shadow == "before" else f"{prefix}.z"
            later = unit.shadow != "before"
            yield Source(name, "shadow", shape, unit.stored, "w0" in unit.flat, used=later)
    yield from _beside(prefix, unit)


def _beside(prefix: str, unit: Unit) -> Iterator[Source]:
    if unit.bias:
        yield Source(f"{prefix}.bias", "bias", (sum(unit.rows),), unit.stored, "bias" in unit.flat)
    if unit.scale or unit.process in ("dequantize", "number", "maximum"):
        yield Source(f"{prefix}.scale", "scale", (1,), "float32", "scale" in unit.flat)
    if unit.process == "maximum":
        yield Source(f"{prefix}.scale2", "scale2", (1,), "float32")
    if unit.process in ("order", "unordered"):
        used = unit.process == "order"
        yield Source(f"{prefix}.order", "order", (unit.cols,), "int32", used=used)
    if unit.skipped:
        yield Source(f"{prefix}.skipped", "skipped", (3,), "float32", used=False)


def _unusual(thing: Any, but: str = "") -> str:
    found = []
    for field in fields(thing):
        value = getattr(thing, field.name)
        if field.name != but and (field.default is MISSING or value != field.default):
            found.append(f"{field.name}={value!r}")
    return ", ".join(found) or "plain"
