"""Conversion of a model's tensors to those of its checkpoint, found by converting indices.

Models of transformers keep experts fused and some layers split or transposed, and undo this when
saved. The conversion is determined once, by running the model's own code on element numbers instead
of weights. These are sums of a number for each axis, as long as only whole axes are moved, so that
they take no memory.
"""

import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from deltachain.errors import UnsupportedModelError
from deltachain.publish.model.layout import INSTEAD, NUMBER_BIT, PLACE
from deltachain.torch_names import unwrapped
from deltachain.types import Indices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

MERGED: Final = 1 << 22
"""Largest number of elements of axes that an operation merges: these are numbered one by one."""

WHOLE_AXES: Final = re.compile(
    r"aten\.(alias|detach|permute|select|slice|split|split_with_sizes|squeeze|t|transpose|unbind"
    r"|unsqueeze)"
)
"""Views that move, cut apart or leave out axes of a tensor, and do not merge any."""

ONE_BY_ONE: Final = 60
"""Bytes an element of a conversion whose elements are numbered one by one, at its peak."""

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]  # shapes of live tensors, by name


Moved: TypeAlias = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Function that makes some tensors of a checkpoint from those of a model, moving elements alone."""


class Destination(NamedTuple):
    name: str
    shape: tuple[int, ...]
    start: int
    at: int
    numel: int


class Conversion(NamedTuple):
    targets: tuple[Destination, ...]
    axes: tuple[Indices, ...] | None = None


class SaveConversion:
    """Names and tensors of a model as transformers, or a function, saves them.

    Names are those of the whole model: some are changed only if others are given. ``shapes`` are
    the full shapes of all live tensors.
    """

    def __init__(self, moved: nn.Module | Moved, shapes: Shapes) -> None:
        self._moved = _by_transformers(moved) if isinstance(moved, nn.Module) else moved
        live = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        there = live if self._moved is None else self._moved(live)
        names = {id(tensor): name for name, tensor in live.items()}
        self.names = frozenset(there)
        """Names of the checkpoint."""
        self.renamed: Mapping[str, str] = {
            names[id(tensor)]: name for name, tensor in there.items() if id(tensor) in names
        }
        """Name in the checkpoint by name of each live tensor that keeps its elements."""

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        moved = {self.renamed[name]: t for name, t in tensors.items() if name in self.renamed}
        others = {name: t for name, t in tensors.items() if name not in self.renamed}
        if self._moved is None or not others:
            return moved | others
        return moved | dict(self._moved(others))


def conversions(moved: nn.Module | Moved, shapes: Shapes) -> dict[str, Conversion]:
    """Find the conversions of all tensors that differ between model and checkpoint."""
    saving = SaveConversion(moved, shapes)
    known: dict[object, list[Conversion]] = {}
    found = {
        name: Conversion((Destination(there, shapes[name], 0, 0, math.prod(shapes[name])),))
        for name, there in saving.renamed.items()
        if there != name
    }
    converted = {name: shape for name, shape in shapes.items() if name not in saving.renamed}
    names = set(saving.renamed.values())
    for group in _groups(saving, converted):
        there = saving.convert({name: torch.empty(shapes[name], device="meta") for name in group})
        names |= set(there)
        shaped = *((n, shapes[n]) for n in group), *((n, tuple(t.shape)) for n, t in there.items())
        alike = len(group), tuple((re.sub(r"[0-9]+", "#", name), shape) for name, shape in shaped)
        if alike not in known:
            known[alike] = _measured(saving, {name: shapes[name] for name in group})
        named = list(there)
        for name, (targets, axes) in zip(group, known[alike], strict=True):
            renamed = tuple(t._replace(name=named[int(t.name)]) for t in targets)
            found[name] = Conversion(renamed, axes)
    if names != saving.names:
        raise UnsupportedModelError(
            f"the checkpoint of the model has {sorted(saving.names - names)[:3]}, and "
            f"{sorted(names - saving.names)[:3]} were found instead",
            hint=INSTEAD,
        )
    return found


def _by_transformers(model: nn.Module) -> Moved | None:
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None:
        return None  # not imported, so there is no such model
    model = unwrapped(model)
    if not isinstance(model, transformers.PreTrainedModel):
        return None
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if getattr(model, "_weight_conversions", None) is None and "FSDPModule" in kinds:
        model = _twin(cast("PreTrainedModel", model))
    return partial(_convert, cast("PreTrainedModel", model))


def _twin(model: "PreTrainedModel") -> "PreTrainedModel":
    """Return the model without weights, of the classes before FSDP2: transformers looks there."""
    if model not in _twins:
        kinds = type(model).__mro__
        kind = next(k for k in kinds if not any(c.__name__ == "FSDPModule" for c in k.__mro__))
        with torch.device("meta"):
            _twins[model] = kind(model.config)
    return _twins[model]


_twins: "WeakKeyDictionary[nn.Module, PreTrainedModel]" = WeakKeyDictionary()


def _convert(model: "PreTrainedModel", tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415

    converted: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return converted


def _groups(saving: SaveConversion, shapes: Shapes) -> Iterator[list[str]]:
    groups: list[tuple[list[str], set[str]]] = []
    stubborn: list[str] = []
    for name, shape in shapes.items():
        try:
            names = set(saving.convert({name: torch.empty(shape, device="meta")}))
        except (ValueError, RuntimeError, KeyError, IndexError):
            stubborn.append(name)  # converted only together with others
            continue
        meeting = [group for group in groups if group[1] & names]
        groups = [group for group in groups if not group[1] & names]
        members = [*(member for group in meeting for member in group[0]), name]
        groups.append((members, names.union(*(group[1] for group in meeting))))
    yield from (members for members, _ in groups)
    if stubborn:
        yield stubborn


class Saved(NamedTuple):
    """Element numbers of a tensor: ``first``, and for each axis how much its coordinates add.

    A number has that of the live tensor above ``NUMBER_BIT``, and the flat index below.
    """

    first: int
    axes: tuple[Indices, ...]


def _measured(saving: SaveConversion, shapes: Shapes) -> list[Conversion]:
    """Convert element numbers instead of weights; name targets by their position."""
    starts = {name: number << NUMBER_BIT for number, name in enumerate(shapes)}
    try:
        sums = saving.convert({n: _Sum.whole(starts[n], shape) for n, shape in shapes.items()})
        saved = [
            Saved(t.first, tuple(a.numpy() for a in t.axes)) for t in cast("Any", sums).values()
        ]
        return _inverted(shapes, [tuple(t.shape) for t in sums.values()], saved)
    except Exception as exc:  # noqa: BLE001 - of the model's own code, which knows tensors only
        name, nbytes = next(iter(shapes)), ONE_BY_ONE * sum(map(math.prod, shapes.values()))
        level = logging.WARNING if nbytes >> 30 else logging.DEBUG
        text = "%r is not moved by whole axes when it is saved (%s): this takes %.1f GB to find out"
        logger.log(level, text, name, exc, nbytes / 1e9)
    there = saving.convert(
        {n: torch.arange(math.prod(s)).add_(starts[n]).view(s) for n, s in shapes.items()}
    )
    codes = [t.reshape(-1).numpy() for t in there.values()]
    try:
        saved = [Saved(int(c[0]) if c.size else 0, (c - c[:1],)) for c in codes]
        return _inverted(shapes, [tuple(t.shape) for t in there.values()], saved, flat=True)
    except ValueError as exc:
        raise UnsupportedModelError(
            f"{next(iter(shapes))!r} is computed anew when the model is saved, not only moved",
            hint=INSTEAD,
        ) from exc


class _Sum(Tensor):
    """``Saved`` as a tensor that an operation of torch takes."""

    first: int
    axes: tuple[Tensor, ...]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, first: int, axes: Sequence[Tensor]) -> "_Sum":
        shape = [axis.numel() for axis in axes]
        made: _Sum = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.int64)
        made.first, made.axes = first, tuple(axes)
        return made

    @classmethod
    def whole(cls, first: int, shape: tuple[int, ...]) -> "_Sum":
        if not all(shape):
            raise ValueError("a tensor is empty")
        steps = [math.prod(shape[n:]) for n in range(1, len(shape) + 1)]
        return cls.of(first, [torch.arange(n) * step for n, step in zip(shape, steps, strict=True)])

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override] # noqa: ANN401
        aten, own, rest = torch.ops.aten, args[0], args[1:]
        made: Any = own
        if func in (aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default):
            made = own._viewed(torch.empty(own.shape, device="meta").view(rest[0]).shape)
        elif func is aten.stack.default:
            dim = (rest or (0,))[0] % (own[0].ndim + 1)
            made = torch.cat([one.unsqueeze(dim) for one in own], dim)
        elif func is aten.cat.default:
            made = cls._joined([one for one in own if one.numel()], *rest)
        elif func is aten.new_zeros.default and not math.prod(rest[0]):
            made = torch.empty(rest[0])
        elif WHOLE_AXES.fullmatch(str(func.overloadpacket)):
            # An axis alone, without memory for the others, shows where a view has it.
            alone = [func(one.expand(own.shape), *rest, **kwargs or {}) for one in _apart(own.axes)]
            if isinstance(alone[0], Tensor):
                return own._moved(alone)
            made = [own._moved(one) for one in zip(*alone, strict=True)]
        elif func is not aten.clone.default:
            raise ValueError(f"by {func}")
        return made

    def _moved(self, alone: Sequence[Tensor]) -> "_Sum":
        first = self.first + sum(int(one[(0,) * one.ndim]) for one in alone)
        return self.of(first, [sum(lines) for lines in zip(*map(_lines, alone), strict=True)])

    def _viewed(self, shape: Sequence[int]) -> "_Sum":
        axes: list[Tensor] = []
        sizes: list[int] = []
        left, merged = iter(self.axes), torch.zeros(1, dtype=torch.int64)
        for size in shape:
            sizes.append(size)
            while merged.numel() < math.prod(sizes):
                axis = next(left)
                if merged.numel() > 1 and merged.numel() * axis.numel() > MERGED:
                    raise ValueError("large axes are merged")
                merged = (merged[:, None] + axis).reshape(-1)
            if merged.numel() == math.prod(sizes):
                lines = _lines(merged.view(sizes))
                if not torch.equal(cast("Tensor", sum(_apart(lines))), merged.view(sizes)):
                    raise ValueError("an axis is split unevenly")
                axes += lines
                sizes, merged = [], torch.zeros(1, dtype=torch.int64)
        return self.of(self.first, axes)

    @classmethod
    def _joined(cls, parts: "Sequence[_Sum]", dim: int = 0) -> "_Sum":
        first, axes = parts[0].first, list(parts[0].axes)
        axes[dim] = torch.cat([one.axes[dim] + (one.first - first) for one in parts])
        for one in parts[1:]:
            others = zip(axes, one.axes, strict=True)
            if not all(n == dim % len(axes) or torch.equal(*two) for n, two in enumerate(others)):
                raise ValueError("unlike tensors are joined")
        return cls.of(first, axes)


def _apart(axes: Sequence[Tensor]) -> list[Tensor]:
    """Return what each axis adds, as tensors of all axes."""
    return [axis.view(-1, *(1 for _ in axes[n:])) for n, axis in enumerate(axes, 1)]


def _lines(numbers: Tensor) -> list[Tensor]:
    """Return what the coordinates of each axis add to the number of the first element."""
    lines = [numbers.movedim(n, -1)[(0,) * (numbers.ndim - 1)] for n in range(numbers.ndim)]
    return [line - line[0] for line in lines]


class _Piece(NamedTuple):
    """Elements of a live tensor in a target: what each axis of the target adds to both indices."""

    target: Destination
    live: list[Indices]
    there: list[Indices]


def _inverted(
    shapes: Shapes,
    targets: Sequence[tuple[int, ...]],
    saved: Sequence[Saved],
    *,
    flat: bool = False,
) -> list[Conversion]:
    """Return where each element goes, or raise if it is not one element of a target."""
    if sum(map(math.prod, targets)) != sum(map(math.prod, shapes.values())):
        raise ValueError("elements are added or left out")
    return [
        _conversion((math.prod(shape),) if flat else shape, [*_pieces(number, targets, saved)])
        for number, shape in enumerate(shapes.values())
    ]


def _pieces(
    number: int, targets: Sequence[tuple[int, ...]], saved: Sequence[Saved]
) -> Iterator[_Piece]:
    for position, (shape, (first, axes)) in enumerate(zip(targets, saved, strict=True)):
        if not math.prod(shape):
            continue
        numbers = [(first + axis) >> NUMBER_BIT for axis in axes]
        mixed = [n for n, one in enumerate(numbers) if np.any(one != one[0])]
        if len(mixed) > 1:
            raise ValueError("several axes have elements of several tensors")
        there = [np.arange(axis.size) for axis in axes]
        if mixed:
            there[mixed[0]] = np.flatnonzero(numbers[mixed[0]] == number)
        if not all(one.size for one in there) or (not mixed and first >> NUMBER_BIT != number):
            continue
        live = [axis[at] for axis, at in zip(axes, there, strict=True)]
        there = [math.prod(a.size for a in axes[n:]) * at for n, at in enumerate(there, 1)]
        start = (first + sum(int(one[0]) for one in live)) & PLACE
        at, numel = sum(int(one[0]) for one in there), math.prod(one.size for one in there)
        target = Destination(str(position), shape, start, at, numel)
        yield _Piece(target, [one - one[0] for one in live], [one - one[0] for one in there])


def _conversion(shape: tuple[int, ...], pieces: list[_Piece]) -> Conversion:
    if sum(piece.target.numel for piece in pieces) != math.prod(shape):
        raise ValueError("elements are saved more than once, or not at all")
    pieces.sort(key=lambda piece: piece.target.start)
    runs, end = True, 0
    for target, live, there in pieces:
        runs &= target.start == end and 1 + sum(int(one[-1]) for one in there) == target.numel
        runs &= all(np.array_equal(*both) for both in zip(live, there, strict=True))
        end += target.numel
    if runs:
        return Conversion(tuple(piece.target for piece in pieces))
    places = [_places(shape, piece) for piece in pieces]
    firsts = [sorted({int(one[n][0].min()) for one in places}) for n in range(len(shape))]
    weights = [math.prod(map(len, firsts[n:])) for n in range(1, len(shape) + 1)]
    axes = tuple(np.full(n, -1) for n in shape)
    slots: dict[int, Destination] = {}
    for piece, one in zip(pieces, places, strict=True):
        slot = 0
        for axis, known, weight, (at, adds) in zip(axes, firsts, weights, one, strict=True):
            number = known.index(int(at[0])) * weight
            codes = adds + (number << NUMBER_BIT)
            if np.any((axis[at] != -1) & (axis[at] != codes)):
                raise ValueError("tensors are cut apart in different ways")
            axis[at] = codes
            slot += number
        slots[slot] = piece.target
    if len(slots) != len(pieces) or max(slots) >= len(pieces):
        raise ValueError("tensors are not cut apart by axes")
    return Conversion(tuple(slots[number] for number in range(len(slots))), axes)


def _places(shape: tuple[int, ...], piece: _Piece) -> list[tuple[Indices, Indices]]:
    """Return, for each axis, ascending coordinates and what they add to the index in the target."""
    corner = np.array(np.unravel_index(piece.target.start, shape))
    steps = [
        np.array(np.unravel_index(piece.target.start + live, shape)) - corner[:, None]
        for live in piece.live
    ]
    found = []
    for n in range(len(shape)):
        at, adds = [corner[n : n + 1]], [np.zeros(1, np.int64)]
        moving = [number for number, step in enumerate(steps) if step[n].any()]
        if len(moving) > 1:
            raise ValueError("an axis is taken to several")
        for number in moving:
            alone = (steps[number][n] != 0) & ~np.delete(steps[number], n, 0).any(0)
            at.append(corner[n] + steps[number][n][alone])
            adds.append(piece.there[number][alone])
        order = np.argsort(np.concatenate(at))
        found.append((np.concatenate(at)[order], np.concatenate(adds)[order]))
    for step, there in zip(steps, piece.there, strict=True):
        total = np.zeros_like(there)
        for (known, add), first, moved in zip(found, corner, step, strict=True):
            place = np.searchsorted(known, first + moved).clip(max=known.size - 1)
            total += np.where(known[place] == first + moved, add[place], -1 << NUMBER_BIT)
        if not np.array_equal(total, there):
            raise ValueError("an axis is not a sum of those that it is taken to")
    return found
