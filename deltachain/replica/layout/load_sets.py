"""Loads of sets of tensors, and what they change, to tell which tensors a layer follows.

A layer of many tensors, such as fused experts, is not loaded once for each of them: a load gives
other bits to a set of them, and no two tensors of a kind are in the same sets. A *unit* of a member
or output that changed in exactly the loads of one tensor follows it, and no other of its kind. Sets
are drawn at random, so that a unit of several tensors does not seem to follow another one.
"""

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, count
from math import comb, isqrt
from typing import Final, TypeVar

import torch
from torch import Tensor

from .model_state import ModelState
from .module_members import flat_bytes

_T = TypeVar("_T")

UNITS: Final = 1 << 16
"""Largest number of units of a tensor; a smaller one has a unit for each element."""

PIECE: Final = 1 << 21
"""Number of words that are digested at a time."""

LOADS: Final = 63
"""Largest number of loads that are told apart."""

_ODD: Final = (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85)


def crossing(groups: Sequence[_T]) -> tuple[list[Sequence[_T]], list[Sequence[_T]]]:
    """Return the rows and the columns of a square of groups: no two share both."""
    side = isqrt(max(len(groups) - 1, 0)) + 1
    columns = [groups[at : at + side] for at in range(0, len(groups), side)]
    return [groups[at::side] for at in range(min(side, len(groups)))], columns


def separating(groups: Sequence[_T]) -> Iterator[list[_T]]:
    """Yield subsets with each group, at most three times, but for no other group always with it."""
    sizes = ((number, min(3, max(1, number // 2))) for number in count(1))
    number, times = next(size for size in sizes if comb(*size) >= len(groups))
    chosen = list(zip(groups, combinations(range(number), times), strict=False))
    for at in range(number):
        yield [group for group, numbers in chosen if at in numbers]


def sets_of_kinds(names: Iterable[str]) -> list[list[list[str]]]:
    """Return sets of each kind of tensors, drawn at random; only numbers in names differ in a kind.

    Outputs follow tensors of several kinds, which do not get other bits together.
    """
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in names:
        kinds[re.sub(r"\d+", "0", name)].append(name)
    draw = random.SystemRandom().sample
    return [list(separating(draw(same, len(same)))) for same in kinds.values()]


class UnitChanges:
    """The loads after which units of layers differ from their first state, taken when this is made.

    Units are of tensors, of numbers and, as ``layer()``, of outputs.
    """

    def __init__(self, state: ModelState, layers: frozenset[str]) -> None:
        self._state, self._layers = state, layers
        self._before = dict(self._now())
        self._loads: dict[str, Tensor] = {}

    def look(self, load: int) -> None:
        """Compare units after a load, which has a number below 63; number 0 begins anew."""
        known = self._loads if load else {}
        self._loads = {}
        for name, now in self._now():
            before = self._before.get(name)
            if before is None or before.shape != now.shape or (load and name not in known):
                continue  # it shows nothing from now on
            found = (before != now).to(torch.int64) << load
            self._loads[name] = known[name] | found if load else found

    def loads(self) -> Mapping[str, frozenset[int]]:
        """Return the loads since number 0, as bits, that changed units of each member or output."""
        return {name: frozenset(torch.unique(one).tolist()) for name, one in self._loads.items()}

    def _now(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._state.tensors.items():
            if self._state.owner[name] in self._layers:
                yield name, _digests(tensor)
        for name, number in self._state.numbers_of(self._layers).items():
            yield name, _digests(torch.tensor([number], dtype=torch.float64))
        for layer, output in self._state.outputs_of(self._layers).items():
            yield f"{layer}()", _digests(output)


def _digests(tensor: Tensor) -> Tensor:
    """Return a digest of each unit, int64 ``[units]``, on the device of the tensor."""
    flat, width = flat_bytes(tensor), tensor.element_size()
    if tensor.numel() > UNITS:
        width = -(-tensor.nbytes // UNITS // 8) * 8
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % width))
    is_wide = width % 8 == 0 and flat.storage_offset() % 8 == 0
    words = (flat.view(torch.int64) if is_wide else flat).view(len(flat) // width, -1)
    rows = max(1, PIECE // words.shape[1])
    places = torch.arange(words.shape[1], device=flat.device) * _ODD[0]
    return torch.cat([_mixed(part + places).sum(1) for part in words.split(rows)])


def _mixed(words: Tensor) -> Tensor:
    for odd in _ODD:  # a bijection of each word
        words ^= (words >> 29) & (1 << 35) - 1
        words *= odd
    return words.bitwise_xor_((words >> 32) & (1 << 32) - 1)
