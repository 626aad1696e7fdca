"""Positions of a live tensor's elements in the checkpoint: pure index arithmetic.

A rank of a sharded trainer holds a *box* of each tensor, and the checkpoint may have several
tensors where the model has one (fused experts), or the same one in another order. A route leads
from flat indices into what a rank holds to names and flat indices of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from deltachain.types import Indices, TensorSpec

NUMBER_BIT: Final = 48
"""In a route's table, the number of the slot lies above this bit, the element's index below: no
tensor has 2**48 elements."""
PLACE: Final = (1 << NUMBER_BIT) - 1

RUNS: Final = 1 << 18
"""Most pieces that a window of an anchor may be in: each is a row of a part's directory."""

Selection: TypeAlias = slice | Indices


@dataclass(frozen=True, slots=True)
class Box:
    """The block of a tensor that one rank holds, in row-major order.

    Attributes:
        full: Shape of the whole tensor.
        offset: Where the box begins in it.
        shape: Of the box.
    """

    full: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor."""
        return cls(shape, (0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Elements held."""
        return math.prod(self.shape)

    @property
    def is_rows(self) -> bool:
        """Whether its elements are neighbours in the whole tensor too."""
        return self.shape[1:] == self.full[1:]

    @property
    def run(self) -> int:
        """Least number of consecutive elements that are consecutive in the whole tensor."""
        run = 1
        for full, held in zip(reversed(self.full), reversed(self.shape), strict=True):
            run *= held
            if held != full:
                break
        return run

    def flat(self, local: Indices) -> Indices:
        """Indices into the whole tensor, for ascending ones into the box; they ascend too."""
        if self.is_rows:
            first = self.offset[0] * math.prod(self.full[1:]) if self.full else 0
            return local + first if first else local
        at = np.zeros_like(local)
        dims = zip(np.unravel_index(local, self.shape), self.offset, self.full, strict=True)
        for coordinate, offset, full in dims:
            at = at * full + (coordinate + offset)
        return at

    def before(self, index: int) -> int:
        """Number of elements of the box before an index into the whole tensor."""
        if not self.numel:
            return 0
        count, stride, held = 0, math.prod(self.full), self.numel
        for full, offset, shape in zip(self.full, self.offset, self.shape, strict=True):
            stride, held = stride // full, held // shape
            at, index = divmod(index, stride)
            if not offset <= at < offset + shape:
                return count + held * min(max(at - offset, 0), shape)
            count += (at - offset) * held
        return count + index  # of a tensor without dimensions


class ElementRun(NamedTuple):
    """Consecutive elements of a live tensor that are consecutive in the checkpoint.

    Attributes:
        spec: The checkpoint's tensor.
        start: Flat index of the first in the live tensor; of no meaning where there is a table.
        at: Flat index of the first in the checkpoint's; of no meaning where there is a table.
        numel: Number of elements.
    """

    spec: TensorSpec
    start: int
    at: int
    numel: int


class Piece(NamedTuple):
    """Some elements that a rank holds, all in one tensor of the checkpoint.

    Attributes:
        spec: That tensor.
        select: Their positions among the elements that were routed.
        indices: Flat indices into that tensor, ascending.
    """

    spec: TensorSpec
    select: Selection
    indices: Indices


class AdjacentRuns(NamedTuple):
    """A :class:`Piece` of a window; indices of consecutive elements are a range."""

    spec: TensorSpec
    select: Selection
    indices: Indices | range


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Mapping from the elements of one live tensor on a rank to those of the checkpoint.

    Attributes:
        box: The elements on the rank.
        slots: Runs of elements, ascending by ``start``; they cover the live tensor.
        table: Where neighbours are separated: number of the slot and index in its tensor, for
            every element of the whole live tensor. Shared by all tensors of one shape.
    """

    box: Box
    slots: tuple[ElementRun, ...]
    table: Indices | None = None

    @classmethod
    def straight(cls, spec: TensorSpec, box: Box | None = None) -> Route:
        """Route to the checkpoint's tensor of the same name and shape."""
        return cls(box or Box.whole(spec.shape), (ElementRun(spec, 0, 0, spec.numel),))

    def all_of(self, spec: TensorSpec) -> slice | None:
        """The slice of the box that is one whole checkpoint tensor, in order; else ``None``."""
        for slot in self.slots if self.table is None else ():
            if slot.spec == spec and slot.numel == spec.numel:
                low = self.box.before(slot.start)
                if self.box.before(slot.start + slot.numel) - low == slot.numel:
                    return slice(low, low + slot.numel)
        return None

    def split(self, local: Indices) -> Iterator[Piece]:
        """Split indices by tensor of the checkpoint.

        Args:
            local: Ascending flat indices into the box.
        """
        at = self.box.flat(local)
        if self.table is not None:
            yield from map(Piece._make, self._look_up(self.table, at))
            return
        bounds = [0, at.size]
        if len(self.slots) > 1:
            bounds = [*np.searchsorted(at, [slot.start for slot in self.slots]).tolist(), at.size]
        for slot, low, high in zip(self.slots, bounds, bounds[1:], strict=False):
            if low < high:
                shift = slot.at - slot.start
                mine = at[low:high]
                yield Piece(slot.spec, slice(low, high), mine + shift if shift else mine)

    def _look_up(
        self, table: Indices, at: Indices
    ) -> Iterator[tuple[TensorSpec, Indices, Indices]]:
        codes = table[at]
        order = np.argsort(codes, kind="stable")
        codes = codes[order]
        numbers = np.arange(len(self.slots) + 1, dtype=np.int64) << NUMBER_BIT
        bounds = np.searchsorted(codes, numbers).tolist()
        for slot, low, high in zip(self.slots, bounds, bounds[1:], strict=False):
            if low < high:
                yield slot.spec, order[low:high], codes[low:high] & PLACE

    def windows(self, limit: int) -> Iterator[AdjacentRuns]:
        """All elements of the box, in pieces of at most ``limit`` elements."""
        if self.table is not None:
            at = self.box.flat(np.arange(self.box.numel))
            for spec, select, indices in self._look_up(self.table, at):
                for low, high in pairwise(_cuts(indices, limit)):
                    yield AdjacentRuns(spec, select[low:high], indices[low:high])
            return
        limit = max(1, min(limit, RUNS * self.box.run))
        for slot in self.slots:
            low = self.box.before(slot.start)
            high = self.box.before(slot.start + slot.numel)
            shift = slot.at - slot.start
            for start in range(low, high, limit):
                stop = min(start + limit, high)
                yield AdjacentRuns(slot.spec, slice(start, stop), self._places(start, stop, shift))

    def _places(self, start: int, stop: int, shift: int) -> Indices | range:
        if not self.box.is_rows:
            return self.box.flat(np.arange(start, stop)) + shift
        first = int(self.box.flat(np.array([start]))[0]) + shift
        return range(first, first + stop - start)


def _cuts(indices: Indices, limit: int) -> list[int]:
    """Bounds of windows of at most ``limit`` elements and ``RUNS`` consecutive pieces."""
    gaps = np.flatnonzero(np.diff(indices) != 1) + 1
    return sorted({indices.size, *range(0, indices.size, limit), *gaps[RUNS - 1 :: RUNS].tolist()})
