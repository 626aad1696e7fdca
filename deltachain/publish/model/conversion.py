"""Conversion of a model's tensors to those of its checkpoint, found by converting their indices.

Models of transformers keep experts fused and some layers split or transposed, and undo that when
they are saved. The conversion is found once, by running their own code on numbered elements
in place of weights.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from deltachain.errors import ConfigError
from deltachain.publish.model.layout import NUMBER_BIT, PLACE
from deltachain.publish.model.shard import INSTEAD
from deltachain.types import Indices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Shapes of live tensors, by name."""


class Destination(NamedTuple):
    """Elements of a live tensor that go to one checkpoint tensor; see :class:`ElementRun`."""

    name: str
    shape: tuple[int, ...]
    start: int
    at: int
    numel: int


@dataclass(frozen=True, slots=True, eq=False)
class Conversion:
    """Where the elements of a live tensor go; see :class:`Route`.

    Attributes:
        targets: The tensors of the checkpoint.
        table: Position of every element, where the conversion separates neighbours.
    """

    targets: tuple[Destination, ...]
    table: Indices | None = None


def conversions(model: nn.Module, shapes: Shapes) -> dict[str, Conversion]:
    """Conversions of the tensors that are not in the checkpoint as the model has them.

    Args:
        model: Wrapped or not. Only models of transformers convert anything.
        shapes: Of all live tensors, whole ones.

    Raises:
        ConfigError: The checkpoint has values that are computed, not moved.
    """
    saved = _saved_by_transformers(model)
    if saved is None:
        return {}
    known: dict[object, list[Conversion]] = {}
    found: dict[str, Conversion] = {}
    for group in _groups(saved, shapes):
        there = _convert(saved, {name: torch.empty(shapes[name], device="meta") for name in group})
        alike = (
            tuple((_unnumbered(name), shapes[name]) for name in group),
            tuple((_unnumbered(name), tuple(tensor.shape)) for name, tensor in there.items()),
        )
        if alike not in known:
            known[alike] = _numbered(saved, {name: shapes[name] for name in group})
        for name, conversion in zip(group, known[alike], strict=True):
            found[name] = _renamed(conversion, list(there))
    return found


def as_saved(model: nn.Module, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Convert one tensor of a model to the tensors of a checkpoint."""
    saved = _saved_by_transformers(model)
    yield from ((name, tensor),) if saved is None else _convert(saved, {name: tensor}).items()


def _saved_by_transformers(model: nn.Module) -> PreTrainedModel | None:
    """The model of transformers inside its wrappers, if there is one."""
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None:
        return None  # a model of it would have imported it
    while not isinstance(model, transformers.PreTrainedModel):
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return None
        model = inner
    if getattr(model, "_weight_conversions", None) is None and any(map(_is_fsdp, model.modules())):
        return _twin(cast("PreTrainedModel", model))
    return cast("PreTrainedModel", model)


def _is_fsdp(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same model without weights, with the classes that its modules had before FSDP2.

    transformers finds the conversion of a model that was not loaded by the names of its classes.
    """
    if model not in _twins:
        kinds = type(model).__mro__
        kind = next(k for k in kinds if not any(c.__name__ == "FSDPModule" for c in k.__mro__))
        with torch.device("meta"):
            _twins[model] = kind(model.config)
    return _twins[model]


_twins: WeakKeyDictionary[nn.Module, PreTrainedModel] = WeakKeyDictionary()


def _convert(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors of a model to those of a checkpoint."""
    from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415

    converted: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return converted


def _groups(model: PreTrainedModel, shapes: Shapes) -> Iterator[list[str]]:
    """Live tensors that are converted, grouped by the checkpoint tensors that they share."""
    groups: list[tuple[list[str], set[str]]] = []
    stubborn: list[str] = []
    for name, shape in shapes.items():
        meta = torch.empty(shape, device="meta")
        try:
            there = _convert(model, {name: meta})
        except (ValueError, RuntimeError, KeyError, IndexError):
            stubborn.append(name)  # it takes several to convert
            continue
        if there.get(name) is meta:
            continue
        names = set(there)
        meeting = [group for group in groups if group[1] & names]
        groups = [group for group in groups if not group[1] & names]
        members = [*(member for group in meeting for member in group[0]), name]
        groups.append((members, names.union(*(group[1] for group in meeting))))
    yield from (members for members, _ in groups)
    if stubborn:
        yield stubborn


def _numbered(model: PreTrainedModel, shapes: Shapes) -> list[Conversion]:
    """Convert numbered elements in place of weights; name targets by their position."""
    numbered = {
        name: (torch.arange(_numel(shape)) + (number << NUMBER_BIT)).view(shape)
        for number, (name, shape) in enumerate(shapes.items())
    }
    there = [(tensor.shape, tensor.reshape(-1)) for tensor in _convert(model, numbered).values()]
    codes = [flat.numpy() for _, flat in there]
    everything = np.sort(np.concatenate(codes))
    before = np.concatenate([tensor.reshape(-1).numpy() for tensor in numbered.values()])
    if everything.dtype != np.int64 or not np.array_equal(everything, before):
        raise ConfigError(
            f"{next(iter(shapes))!r} is computed anew when the model is saved, not only moved",
            hint=INSTEAD,
        )
    targets = [tuple(shape) for shape, _ in there]
    return [
        _conversion(number, _numel(shape), targets, codes)
        for number, shape in enumerate(shapes.values())
    ]


def _conversion(
    number: int, numel: int, shapes: Sequence[tuple[int, ...]], codes: Sequence[Indices]
) -> Conversion:
    """Locate the elements of live tensor ``number`` in the converted tensors."""
    targets: list[Destination] = []
    table = np.empty(numel, np.int64)
    straight = True
    for position, (shape, code) in enumerate(zip(shapes, codes, strict=True)):
        places = np.flatnonzero(code >> NUMBER_BIT == number)
        if not places.size:
            continue
        live = code[places] & PLACE
        table[live] = places + (len(targets) << NUMBER_BIT)
        straight &= _consecutive(places) and _consecutive(live)
        target = Destination(str(position), shape, int(live[0]), int(places[0]), places.size)
        targets.append(target)
    if straight:
        return Conversion(tuple(sorted(targets, key=lambda target: target.start)))
    return Conversion(tuple(targets), table)


def _consecutive(indices: Indices) -> bool:
    return bool(np.all(np.diff(indices) == 1))


def _renamed(conversion: Conversion, names: Sequence[str]) -> Conversion:
    """This conversion with the tensor names of another layer."""
    targets = tuple(t._replace(name=names[int(t.name)]) for t in conversion.targets)
    return Conversion(targets, conversion.table)


def _unnumbered(name: str) -> str:
    return re.sub(r"[0-9]+", "#", name)


def _numel(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))
