"""Experts in slots: which expert lies in which slot of the stacked weights of a rank.

An engine that balances experts copies them into several slots, and moves them while it serves. Its
map says where they are; a recording of its loader says which tensors go where. The map is believed
if both agree: an expert has the same tensors in all of its slots, now and under earlier maps, and
no two experts have the same ones. The bits that moved are proven by the state digest.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from torch import nn

from deltachain.errors import TensorMismatchError
from deltachain.replica.engine import EngineModel
from deltachain.replica.placements import Placement

from .classes import TensorClass
from .discover import Layout
from .load_recorder import record
from .loaded_checkpoint import LoadedCheckpoint
from .module_members import storage_id

Content: TypeAlias = frozenset[object]
"""The tensors of one slot, with their windows and where in the slot these are."""


class ExpertSlots:
    """A map of experts, and the places that the engine's loader writes while it holds.

    Raises a :class:`TensorMismatchError` if the loader does not follow the map.
    """

    def __init__(
        self, model: EngineModel, source: LoadedCheckpoint, before: "ExpertSlots | None" = None
    ) -> None:
        self.slots = model.slots()
        self.places: Mapping[str, tuple[Placement, ...]] = {}
        self._contents: dict[str, dict[int, Content]] = {}
        if not self.slots:
            return
        modules = model.modules()
        self.places = record(model.load, source.loaded.values(), modules).placements(source.owner)
        for layer, experts in self.slots.items():
            known = before._contents.get(layer, {}) if before else {}
            found = _contents(modules[layer], len(experts), self.places)
            self._contents[layer] = _agreed(layer, experts, found, known)

    def moved(self, layout: Layout, before: "ExpertSlots") -> Layout:
        """Return the layout of a rank whose experts have moved from the slots of ``before``."""
        unknown = any(not group.layers for _, group in layout.groups)
        for layer, experts in self.slots.items():
            came = set(experts) - set(before.slots.get(layer, ()))
            if came and (unknown or layer in layout.layers):
                raise TensorMismatchError(
                    f"expert {min(came)} of {layer} came to a rank that has no copy of it to load",
                    hint="restart the engine to follow on",
                )
        written = {storage_id(one.live) for places in layout.places.values() for one in places}
        places = {n: self.places[n] for n, kind in layout.classes.items() if kind in _HERE}
        for name, found in places.items():
            if any(storage_id(one.live) not in written for one in found):
                raise TensorMismatchError(
                    f"{name!r} moved to a tensor that was not proven", tensor=name
                )
        kinds: dict[str, TensorClass] = {
            name: "in_place" if found else "absent" for name, found in places.items()
        }
        return replace(
            layout,
            classes={**layout.classes, **kinds},
            places={name: found for name, found in places.items() if found},
            readable={name: self.places[name] for name in layout.readable},
        )


_HERE = ("in_place", "absent")


def _contents(
    layer: nn.Module, count: int, places: Mapping[str, tuple[Placement, ...]]
) -> list[set[object]]:
    """Return the tensors that a loader writes to each slot of a layer's parameters."""
    stacked = {
        storage_id(tensor): (path, tensor)
        for path, tensor in layer.named_parameters()
        if tensor.ndim and len(tensor) == count
    }
    found: list[set[object]] = [set() for _ in range(count)]
    for name, windows in places.items():
        for place in windows:
            path, tensor = stacked.get(storage_id(place.live), ("", None))
            if tensor is None:
                continue
            width = tensor.stride(0)
            slot, at = divmod(place.at - int(tensor.storage_offset()), width)
            if at + sum((dim.size - 1) * dim.live for dim in place.dims) >= width:
                raise TensorMismatchError(
                    f"the engine loads several experts of {name!r} at once", tensor=name
                )
            found[slot].add((path, at, name, place.offset, place.dims))
    return found


def _agreed(
    layer: str, experts: tuple[int, ...], found: list[set[object]], known: Mapping[int, Content]
) -> dict[int, Content]:
    """Return the tensors of each expert that was seen, or refuse a loader that knows others."""
    contents = dict(known)
    for expert, content in zip(experts, found, strict=True):
        if contents.setdefault(expert, frozenset(content)) != content:
            raise TensorMismatchError(
                f"the engine loads other tensors into the slots of expert {expert} of {layer} "
                "than its map of experts says",
                hint="start it without the mode that moves experts",
            )
    if len(set(contents.values())) != len(contents):
        raise TensorMismatchError(
            f"the engine loads the same tensors into the slots of different experts of {layer}",
            hint="start it without the mode that moves experts",
        )
    return contents
