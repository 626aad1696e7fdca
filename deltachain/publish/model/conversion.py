"""Conversion of a model's tensors to those of its checkpoint, found by converting indices.

Models of transformers keep experts fused and some layers split or transposed, and undo this when
saved. The conversion is determined once, by running the model's own code on element numbers instead
of weights.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast
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

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]  # shapes of live tensors, by name


class Destination(NamedTuple):
    name: str
    shape: tuple[int, ...]
    start: int
    at: int
    numel: int


class Conversion(NamedTuple):
    targets: tuple[Destination, ...]
    table: Indices | None = None


class SaveConversion:
    """Names and tensors of a model as transformers saves them.

    Names are those of the whole model: some are changed only if others are given. ``shapes`` are
    the full shapes of all live tensors.
    """

    def __init__(self, model: nn.Module, shapes: Shapes) -> None:
        self._model = _saved_by_transformers(model)
        live = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        there = live if self._model is None else _convert(self._model, live)
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
        if self._model is None or not others:
            return moved | others
        return moved | _convert(self._model, others)


def conversions(model: nn.Module, shapes: Shapes) -> dict[str, Conversion]:
    """Find the conversions of all tensors that differ between model and checkpoint."""
    saving = SaveConversion(model, shapes)
    known: dict[object, list[Conversion]] = {}
    found = {
        name: Conversion((Destination(there, shapes[name], 0, 0, _numel(shapes[name])),))
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
            known[alike] = _numbered(saving, {name: shapes[name] for name in group})
        named = list(there)
        for name, (targets, table) in zip(group, known[alike], strict=True):
            renamed = tuple(t._replace(name=named[int(t.name)]) for t in targets)
            found[name] = Conversion(renamed, table)
    if names != saving.names:
        raise UnsupportedModelError(
            f"the checkpoint of the model has {sorted(saving.names - names)[:3]}, and "
            f"{sorted(names - saving.names)[:3]} were found instead",
            hint=INSTEAD,
        )
    return found


def _saved_by_transformers(model: nn.Module) -> "PreTrainedModel | None":
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None:
        return None  # not imported, so there is no such model
    model = unwrapped(model)
    if not isinstance(model, transformers.PreTrainedModel):
        return None
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if getattr(model, "_weight_conversions", None) is None and "FSDPModule" in kinds:
        return _twin(cast("PreTrainedModel", model))
    return cast("PreTrainedModel", model)


def _twin(model: "PreTrainedModel") -> "PreTrainedModel":
    """Return the model without weights, of the classes before FSDP2: transformers looks there."""
    if model not in _twins:
        kinds = type(model).__mro__
        kind = next(k for k in kinds if not any(c.__name__ == "FSDPModule" for c in k.__mro__))
        with torch.device("meta"):
            _twins[model] = kind(model.config)
    return _twins[model]


_twins: "WeakKeyDictionary[nn.Module, PreTrainedModel]" = WeakKeyDictionary()


def _convert(model: "PreTrainedModel", tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
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


def _numbered(saving: SaveConversion, shapes: Shapes) -> list[Conversion]:
    """Convert element numbers instead of weights; name targets by their position."""
    numbered = {
        name: (torch.arange(_numel(shape)) + (number << NUMBER_BIT)).view(shape)
        for number, (name, shape) in enumerate(shapes.items())
    }
    there = [(tensor.shape, tensor.reshape(-1)) for tensor in saving.convert(numbered).values()]
    codes = [flat.numpy() for _, flat in there]
    everything = np.sort(np.concatenate(codes))
    before = np.concatenate([tensor.reshape(-1).numpy() for tensor in numbered.values()])
    if everything.dtype != np.int64 or not np.array_equal(everything, before):
        raise UnsupportedModelError(
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
    targets: list[Destination] = []
    table = np.empty(numel, np.int64)
    straight = True
    for position, (shape, code) in enumerate(zip(shapes, codes, strict=True)):
        places = np.flatnonzero(code >> NUMBER_BIT == number)
        if not places.size:
            continue
        live = code[places] & PLACE
        table[live] = places + (len(targets) << NUMBER_BIT)
        straight &= all(bool(np.all(np.diff(indices) == 1)) for indices in (places, live))
        target = Destination(str(position), shape, int(live[0]), int(places[0]), places.size)
        targets.append(target)
    if straight:
        return Conversion(tuple(sorted(targets, key=lambda target: target.start)))
    return Conversion(tuple(targets), table)


def _numel(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))
