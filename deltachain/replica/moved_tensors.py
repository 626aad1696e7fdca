"""A record of where live tensors are and how engines arranged experts, to see what they moved.

Placements are found once. An engine may replace its tensors, or move experts between the slots of
one tensor, and then change the map from experts to slots. The record is compared before each stage,
swap and proof.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from deltachain.chain.tensor_plan import TensorPlan
from deltachain.errors import EngineDamagedError, TensorMismatchError
from deltachain.kernels.protocol import same_bits
from deltachain.kernels.torch_kernels import bits_of

from .batches import GroupPlan
from .engine import EngineModel
from .layout.loaded_checkpoint import LoadedCheckpoint
from .layout.module_members import bytes_of
from .spool import host_bits
from .staged import Share

# Engines tie tensors by their values, such as a head that equals the embedding. The decision is
# made once: no load parts the tensors again, and each load ignores one of them. A version may
# change them only to equal bits.


PEEK: Final = 64  # elements that are compared first


class LateTie(NamedTuple):
    """Two tensors of the chain that the engine keeps as one."""

    ignored: str  # the tensor that nothing in the engine follows
    followed: str  # the tensor whose bits the engine computes from instead


def find_late_ties(
    source: LoadedCheckpoint, ignored: Collection[str], followed: Iterable[str]
) -> tuple[LateTie, ...]:
    """Find tensors that nothing follows, though others with their bits were loaded as well.

    Vectors whose elements are all equal, such as biases of zeros, are alike without being tied.
    """
    specs, held = source.specs, source.names
    wanted = [
        name
        for name in ignored
        if held[name] and (len(specs[name].shape) > 1 or name not in source.uniform)
    ]
    others = [name for name in followed if held[name]] if wanted else []
    return tuple(
        LateTie(name, other)
        for name in wanted
        for other in others
        if (specs[name].dtype, specs[name].shape) == (specs[other].dtype, specs[other].shape)
        and same_bits(source.bits(name, PEEK), source.bits(other, PEEK))
        and same_bits(source.bits(name), source.bits(other))
    )


class LateTies:
    """The late ties of a rank, held against each plan."""

    def __init__(self, ties: Iterable[LateTie] = ()) -> None:
        self.ties = tuple(ties)
        self.names = frozenset(name for tie in self.ties for name in tie)

    def noted(
        self, plans: Iterable[TensorPlan | GroupPlan], noted: dict[str, list[TensorPlan]]
    ) -> Iterator[TensorPlan | GroupPlan]:
        for given in plans:
            if self.names and not self.names.isdisjoint(given.names):
                for one in given.tensor_plans():
                    if one.spec.name in self.names:
                        noted.setdefault(one.spec.name, []).append(one)
            yield given

    def check(
        self, plans: Mapping[str, Sequence[TensorPlan]], share_of: Callable[[str], Share]
    ) -> None:
        """Refuse plans after which tied tensors would have different bits; nothing is written."""
        for tie in self.ties:
            if plans.keys().isdisjoint(tie):
                continue
            share = share_of(tie.followed)
            if share.places and not _stay_equal(plans, tie, share):
                raise TensorMismatchError(
                    f"{tie.ignored!r} and {tie.followed!r} were equal when the engine loaded them, "
                    "and it keeps them as one; in this version they differ",
                    tensor=tie.ignored,
                    hint="start the engine anew from a checkpoint in which they differ (deltachain "
                    "pull makes one), with tie_word_embeddings false in its config.json; see "
                    "docs/troubleshooting.md#late-ties",
                )


def _stay_equal(plans: Mapping[str, Sequence[TensorPlan]], tie: LateTie, share: Share) -> bool:
    spec = next(given.spec for name in tie for given in plans.get(name, ()))
    # The bits of both are equal before the plan: those of the followed tensor are held.
    old = partial(host_bits, [place for _, place in share.places], spec)
    before = old(share.low, share.high)
    one, two = (
        before.after([given.read(share.low, share.high, old) for given in plans.get(name, ())])
        for name in tie
    )
    held: Any = ... if one.held is None else one.held
    return bool(np.array_equal(one.bits[held], two.bits[held]))


REPLACED: Final = (
    "the engine replaced live tensors; where they are now is known, what they hold is not"
)

SAMPLES: Final = 16  # elements of each slot of a stacked tensor that are compared
MAPS: Final = re.compile(r"expert.*map|expert.*mask|_to_(physical|logical|global|local)")
"""Names of maps from experts to slots, in vLLM and SGLang."""

Place: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Storage, offset, shape and strides of a live tensor."""


class LiveRecord:
    """What was known of live tensors when a rank last looked or wrote."""

    def __init__(
        self, model: EngineModel, storages: Collection[int], first: "LiveRecord | None" = None
    ) -> None:
        found = model.tensors()
        self.places = {name: _place(t) for name, t in found.items() if _place(t)[0] in storages}
        # Running makes some maps, which are then as they were first seen.
        self.maps: dict[str, bytes] = maps_of(found) | (first.maps if first else {})
        self._apart = {name: _apart(tensor) for name, tensor in _stacked(found)}
        self.slots = slots_of(found, self._apart)

    def difference(self, model: EngineModel) -> str:
        """Return how the engine replaced or moved what it holds since; empty if it did not."""
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
        slots = slots_of(found, self._apart)
        moved = next((n for n, bits in self.slots.items() if slots.get(n) != bits), "")
        return f"{moved!r} holds other bits than were written: others wrote to it" if moved else ""


def maps_of(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {
        name: bytes_of(tensor)
        for name, tensor in tensors.items()
        if not tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)
        if MAPS.search(name.rpartition(".")[2])
    }


def slots_of(tensors: Mapping[str, Tensor], apart: Mapping[str, list[int]]) -> dict[str, bytes]:
    """Return some bits of every slot of stacked parameters, at some positions ``apart`` too."""
    return {
        name: bytes_of(_picked(tensor, apart.get(name, []))) for name, tensor in _stacked(tensors)
    }


def _stacked(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters of three dimensions or more, of which the first counts slots."""
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter) and tensor.ndim > 2 and tensor.numel():
            yield name, tensor.detach()


def _apart(stacked: Tensor) -> list[int]:
    """Return flat positions at which slots differ whose samples do not.

    Experts made of one layer (sparse upcycling) are the same in most elements.
    """
    positions: list[int] = []
    groups = _groups(range(len(stacked)), _picked(stacked, []))
    while groups:
        first, *others = groups.pop()
        one = bits_of(stacked[first].contiguous())
        for other in others:
            if (differs := one != bits_of(stacked[other].contiguous())).any():
                positions.append(int(differs.byte().argmax()))
                members = [first, *others]
                groups += _groups(members, _picked(stacked, positions[-1:])[members])
                break
    return positions


def _groups(members: Sequence[int], samples: Tensor) -> list[list[int]]:
    """Return the members that have equal samples, two or more of each."""
    bits, alike = bytes_of(samples), dict[bytes, list[int]]()
    width = len(bits) // len(members)
    for number, member in enumerate(members):
        alike.setdefault(bits[number * width : (number + 1) * width], []).append(member)
    return [group for group in alike.values() if len(group) > 1]


def _picked(stacked: Tensor, apart: Sequence[int]) -> Tensor:
    """Return ``(slots, n)`` elements: some evenly spaced within each slot, and those given."""
    inner = stacked.shape[1:]
    count = stacked[0].numel()
    step = max(1, count // SAMPLES)
    even = range(0, count, step)[: SAMPLES + 1]
    at = torch.tensor([*even, *(one for one in apart if one < count)])
    where: Any = torch.unravel_index(at, inner)
    slots: Any = (slice(None), *(one.to(stacked.device) for one in where))
    return stacked[slots]


def _place(tensor: Tensor) -> Place:
    storage = tensor.untyped_storage().data_ptr()
    return storage, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
