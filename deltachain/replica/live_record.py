"""A record of where live tensors are and how engines arranged experts, to see what they moved.

Placements are found once. An engine may replace its tensors, or move experts between the slots of
one tensor, and then change the map from experts to slots. The record is compared before each stage,
swap and proof.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from deltachain.errors import EngineDamagedError
from deltachain.replica.engine import EngineModel

REPLACED: Final = (
    "the engine replaced live tensors; where they are now is known, what they hold is not"
)

SAMPLES: Final = 16
"""Elements of each slot of a stacked tensor that are compared."""

MAPS: Final = re.compile(r"expert.*map|expert.*mask|_to_(physical|logical|global|local)")
"""Names of maps from experts to slots, in vLLM and SGLang."""

Place: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Storage, offset, shape and strides of a live tensor."""


class LiveRecord:
    """What was known of live tensors when a rank last looked or wrote.

    Args:
        model: The rank's model.
        storages: Storages that tensors are written to in place.
        first: Record from the attach, whose maps stay: no swap changes them.

    Attributes:
        places: Places of the tensors in these storages.
        maps: Bits of the maps from experts to slots.
        slots: Bits of some elements of every slot of stacked parameters.
    """

    def __init__(
        self, model: EngineModel, storages: Collection[int], first: LiveRecord | None = None
    ) -> None:
        found = model.tensors()
        self.places = {name: _place(t) for name, t in found.items() if _place(t)[0] in storages}
        # Running makes some maps, which are then as they were first seen.
        self.maps: dict[str, bytes] = maps_of(found) | (first.maps if first else {})
        self.slots = slots_of(found)

    def difference(self, model: EngineModel) -> str:
        """Return how the engine replaced or moved what it holds since; empty if it did not.

        Raises:
            EngineDamagedError: It arranged its experts anew.
        """
        found = model.tensors()
        maps = maps_of(found)
        for name, bits in self.maps.items():
            if maps.get(name, bits) != bits:  # one that is gone is made again by running
                raise EngineDamagedError(
                    f"the engine arranged its experts anew: {name!r} is not what it was",
                    tensor=name,
                    hint="restart the engine without the mode that moves experts; see "
                    "docs/troubleshooting.md#experts-that-move",
                )
        if any(n not in found or _place(found[n]) != at for n, at in self.places.items()):
            return REPLACED
        slots = slots_of(found)
        moved = next((n for n, bits in self.slots.items() if slots.get(n) != bits), "")
        return f"{moved!r} holds other bits than were written: others wrote to it" if moved else ""


def maps_of(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Return the bits of all maps from experts to slots, by name."""
    return {
        name: _bits(tensor)
        for name, tensor in tensors.items()
        if not tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)
        if MAPS.search(name.rpartition(".")[2])
    }


def slots_of(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Return some bits of every slot of stacked parameters: those of three dimensions or more."""
    picked: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter) and tensor.ndim > 2 and tensor.numel():
            picked[name] = _picked(tensor.detach())
    return {name: _bits(sample) for name, sample in picked.items()}


def _picked(stacked: Tensor) -> Tensor:
    """Return ``(slots, n)`` elements of a stacked tensor, evenly spaced within each slot."""
    inner = stacked.shape[1:]
    count = stacked[0].numel()
    step = max(1, count // SAMPLES)
    at = torch.arange(0, count, step)[: SAMPLES + 1]
    where: Any = torch.unravel_index(at, inner)
    slots: Any = (slice(None), *(one.to(stacked.device) for one in where))
    return stacked[slots]


def _bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return flat.cpu().numpy().tobytes()


def _place(tensor: Tensor) -> Place:
    storage = tensor.untyped_storage().data_ptr()
    return storage, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
