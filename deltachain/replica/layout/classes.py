"""Classes of tensors, by their way into live weights, and the agreement of all ranks on them."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import prod
from typing import Final, Literal, TypeAlias, TypeVar, get_args

from deltachain.format.documents import Struct
from deltachain.types import TensorSpec

T = TypeVar("T", bound=Hashable)


def join_sets(groups: Iterable[Iterable[T]]) -> list[frozenset[T]]:
    """Join groups that share members, also over others; return the sets, by their first members."""
    joined: dict[T, list[T]] = {}
    for group in groups:
        first: list[T] | None = None
        for member in group:
            other = joined.setdefault(member, [member])
            if first is None or first is other:
                first = other
                continue
            first, less = (first, other) if len(first) >= len(other) else (other, first)
            first += less
            joined.update(dict.fromkeys(less, first))
    return [frozenset(one) for one in {id(one): one for one in joined.values()}.values()]


TensorClass: TypeAlias = Literal[
    "absent", "unused", "in_place", "loaded", "reloaded", "repacked", "refused"
]
"""Class of a tensor.

``in_place``: changed elements are scattered into live parameters. ``loaded``: the whole tensor goes
through the engine's own loader, from a copy on the host. ``reloaded``: all tensors of its layer do,
because the engine packs that layer after loading. ``repacked``: the same, from raw weights, because
the engine's own reload does not repeat its packing. ``unused``: no member or output of the engine
follows it. ``refused``: nothing is proven. ``absent``: this rank has none of it.
"""

ON_HOST: Final = frozenset(("loaded", "reloaded", "repacked"))
"""Classes of tensors with a copy on the host of the rank."""

ORDER: Final[dict[str, int]] = {kind: number for number, kind in enumerate(get_args(TensorClass))}
"""Number of each class, from best to worst; a tensor takes the worst class among all ranks."""

Form: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A window by its numbers: offset, size and stride."""


class Classified(Struct, frozen=True, kw_only=True):
    """Class of one tensor on one rank."""

    kind: TensorClass
    reason: str = ""  # reason why it is not in place; empty if it is
    windows: tuple[Form, ...] = ()  # windows that the loader moves; none if it computes
    layers: tuple[str, ...] = ()  # layers that the engine reloads with it, together
    comparable: bool = False  # whether these can be compared with a fresh load


class Agreement(Struct, frozen=True, kw_only=True):
    """The classes for all ranks, decided from the findings of each."""

    classes: dict[str, TensorClass]  # class of every tensor; never absent
    reasons: dict[str, str]  # reason of every tensor that is not in place
    holders: dict[str, tuple[tuple[str, ...], ...]]  # holders of each window of every tensor
    compared: frozenset[str] = frozenset()  # tensors whose layers are compared after a swap

    @property
    def refused(self) -> dict[str, str]:
        return {n: self.reasons[n] for n, kind in self.classes.items() if kind == "refused"}


def agree(specs: Iterable[TensorSpec], ranks: Sequence[Mapping[str, Classified]]) -> Agreement:
    classes: dict[str, TensorClass] = {}
    reasons: dict[str, str] = {}
    holders: dict[str, tuple[tuple[str, ...], ...]] = {}
    for spec in specs:
        found = [rank[spec.name] for rank in ranks]
        kind, reason = _worst(spec, found)
        classes[spec.name] = kind
        if reason:
            reasons[spec.name] = reason
        holders[spec.name] = _holders(found, on_host=kind != "in_place")
    return Agreement(classes=classes, reasons=reasons, holders=holders, compared=_compared(ranks))


def _compared(ranks: Sequence[Mapping[str, Classified]]) -> frozenset[str]:
    """Return the tensors whose layers every rank can compare.

    Ranks may exchange values as they load. So what is loaded together on one rank, into the same
    layers or with the same tensors, is compared by all ranks or by none.
    """
    loaded = [(name, one) for rank in ranks for name, one in rank.items() if one.layers]
    others = {name for name, one in loaded if not one.comparable}
    together = join_sets(
        [(name, ""), *(("", layer) for layer in one.layers)] for name, one in loaded
    )
    names = (frozenset(name for name, _ in found if name) for found in together)
    return frozenset().union(*(found for found in names if found.isdisjoint(others)))


def orphans(specs: Iterable[str], ranks: Sequence[Mapping[str, Classified]]) -> list[str]:
    """Return the tensors that no rank holds, and that are not proven unused on every rank."""
    kinds = {name: {rank[name].kind for rank in ranks} for name in specs}
    return [n for n, found in kinds.items() if "absent" in found <= {"absent", "unused"}]


def _worst(spec: TensorSpec, found: Sequence[Classified]) -> tuple[TensorClass, str]:
    present = [one for one in found if one.kind not in ("absent", "unused")]
    if found and all(one.kind == "unused" for one in found):
        return "unused", found[0].reason
    if not present:
        return "refused", "no rank holds it"
    worst = max(present, key=lambda one: ORDER[one.kind])
    held = sum(prod(size) for _, size, _ in {form for one in present for form in one.windows})
    # A loader that computes moves no window. What is loaded may be moved more than once.
    in_part = worst.kind in ON_HOST and all(one.windows for one in present) and held < spec.numel
    if in_part or (worst.kind == "in_place" and held != spec.numel):
        return "refused", f"the ranks hold {held:,} of its {spec.numel:,} elements"
    return worst.kind, worst.reason


def _holders(found: Sequence[Classified], *, on_host: bool) -> tuple[tuple[str, ...], ...]:
    if on_host:
        held = [one.kind not in ("absent", "unused") for one in found]
        label = ",".join(str(number) for number, holds in enumerate(held) if holds)
        return tuple((label,) if holds else () for holds in held)
    who: dict[Form, list[str]] = defaultdict(list)
    for number, one in enumerate(found):
        for form in one.windows:
            who[form].append(str(number))
    return tuple(tuple(",".join(who[form]) for form in one.windows) for one in found)


def summary(ranks: int, classes: Mapping[str, Mapping[str, int]]) -> str:
    ways = [
        f"{row['tensors']} {kind.replace('_', ' ')} ({row['nbytes']:,} B)"
        for kind, row in classes.items()
    ]
    return f"tensors on {ranks} rank{'s' if ranks > 1 else ''}: {', '.join(ways)}"
