"""What a random engine is made of; printed, it is the description of a failure.

A unit is one layer: the tensors of a checkpoint that are fused into its weight, what else it has
beside the weight, how its loader writes all that, and what becomes of it after loading.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from random import Random
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Region:
    """Some elements of a parameter of a layer."""

    layer: nn.Module
    key: str
    cut: Callable[[Tensor], Tensor]

    @property
    def parameter(self) -> Any:
        return getattr(self.layer, self.key)

    @property
    def live(self) -> Tensor:
        return self.cut(self.parameter.data)


Writer: TypeAlias = Callable[[Region, Tensor], object]


def halves(region: Region, w: Tensor) -> None:
    half = len(w) // 2
    region.live.narrow(0, 0, half).copy_(w.narrow(0, 0, half))
    region.live.narrow(0, half, len(w) - half).copy_(w.narrow(0, half, len(w) - half))


def strided(region: Region, w: Tensor) -> None:
    region.live[0::2].copy_(w[0::2])
    region.live[1::2].copy_(w[1::2])


def chunks(region: Region, w: Tensor) -> None:
    for live, source in zip(region.live.unbind(-1), w.unbind(-1), strict=True):
        live.copy_(source)


PURE: Final[dict[str, Writer]] = {
    "copy": lambda r, w: r.live.copy_(w),
    "assign": lambda r, w: r.live.__setitem__(..., w),
    "copy to the parameter": lambda r, w: r.cut(r.parameter).copy_(w),
    "halves": halves,
    "strided": strided,
    "columns": chunks,
    "turned twice": lambda r, w: r.live.copy_(w.transpose(0, -1).transpose(0, -1)),
    "reshaped": lambda r, w: r.live.copy_(w.reshape(-1).view(w.shape)),
    "contiguous": lambda r, w: r.live.copy_(w.contiguous()),
}
"""What a place can be recorded of."""


def through_temporary(region: Region, w: Tensor) -> None:
    region.live.copy_(torch.empty(w.shape, dtype=w.dtype).copy_(w))


def fill_first(region: Region, w: Tensor) -> None:
    region.live.fill_(0)
    region.live.copy_(w)


def double(region: Region, w: Tensor) -> None:
    region.live.copy_(w)
    region.live.mul_(2)


def unless_nan(region: Region, w: Tensor) -> None:
    if not bool(w.float().isnan().any()):
        region.live.copy_(w)


def first_row(region: Region, w: Tensor) -> None:
    region.live.copy_(w[:1].expand(region.live.shape))


def last_write_wins(region: Region, w: Tensor) -> None:
    region.live.copy_(w.flip(0))
    region.live.copy_(w)


def then_zero_a_row(region: Region, w: Tensor) -> None:
    region.live.copy_(w)
    region.live[-1:].zero_()


COMPUTED: Final[dict[str, Writer]] = {
    "clone": lambda r, w: r.live.copy_(w.clone()),
    "temporary": through_temporary,
    "rolled": lambda r, w: r.live.copy_(torch.cat([w[1:], w[:1]])),
    "exponential": lambda r, w: r.live.copy_(-torch.exp(w.float())),
    "one more": lambda r, w: r.live.copy_(w + 1),
    "edited": lambda r, w: r.live.copy_(w.add_(1)),
    "negated in place": lambda r, w: r.live.copy_(w.neg_()),
    "cast": lambda r, w: r.live.copy_(w.float()),
    "indexed": lambda r, w: r.live.__setitem__(torch.arange(len(w)).flip(0), w.to(r.live.dtype)),
    "index_copy": lambda r, w: r.live.index_copy_(0, torch.arange(len(w)), w.to(r.live.dtype)),
    "foreach": lambda r, w: torch._foreach_copy_([r.live], [w]),
    "out": lambda r, w: torch.add(w.to(r.live.dtype), 0, out=r.live),
    "filled first": fill_first,
    "doubled": double,
    "last wins": last_write_wins,
    "unless NaN": unless_nan,
    "first row": first_row,
    "row zeroed": then_zero_a_row,
}
"""What must be loaded by the loader itself, and can be as often as one likes."""


def _new_parameter(region: Region, w: Tensor) -> None:
    made = region.parameter.data.clone()
    region.cut(made).copy_(w)
    setattr(region.layer, region.key, nn.Parameter(made, requires_grad=False))


def _new_data(region: Region, w: Tensor) -> None:
    made = region.parameter.data.clone()
    region.cut(made).copy_(w)
    region.parameter.data = made


REPLACING: Final[dict[str, Writer]] = {"new parameter": _new_parameter, "new data": _new_data}
"""What puts another tensor where the old one was."""


def _maximum(region: Region, w: Tensor) -> None:
    region.live.copy_(torch.maximum(region.live.float(), w.float()))


def _once(region: Region, w: Tensor) -> None:
    if not getattr(region.layer, "loader_done", False):
        region.live.copy_(w)
    if not w.is_meta:
        vars(region.layer)["loader_done"] = True


def _never_again(region: Region, w: Tensor) -> None:
    if getattr(region.layer, "loader_done", False):
        raise RuntimeError("this layer has been loaded")
    region.live.copy_(w)
    if not w.is_meta:
        vars(region.layer)["loader_done"] = True


def _turn_by_turn(region: Region, w: Tensor) -> None:
    odd = getattr(region.layer, "loader_odd", False)
    region.live.copy_(w.flip(0) if odd else w)
    if not w.is_meta:
        vars(region.layer)["loader_odd"] = not odd


STATEFUL: Final[dict[str, Writer]] = {
    "added": lambda r, w: r.live.add_(w.to(r.live.dtype)),
    "maximum": _maximum,
    "once": _once,
    "never again": _never_again,
    "turn by turn": _turn_by_turn,
}
"""What loads right into a raw parameter only."""

WRITERS: Final[dict[str, Writer]] = PURE | COMPUTED | REPLACING | STATEFUL

BLIND: Final = frozenset({"unless NaN"})
"""What cannot be run on tensors without bits."""


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
