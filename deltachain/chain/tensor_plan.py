"""Tensor plan: what a plan says of one tensor, decoded a window at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import numpy as np

from deltachain import errors
from deltachain.checkpoint import Checkpoint
from deltachain.codec import ENCODINGS, Part
from deltachain.codec.container import SEGMENT
from deltachain.codec.frames import TensorReader
from deltachain.delta import OldBits, Piece, TensorDelta, bits_are_at_fault, fold_within
from deltachain.types import TensorSpec


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Changes of one tensor by a plan, or by one object of a plan of one edge."""

    spec: TensorSpec
    parts: tuple[Part, ...]  # open objects that give elements of the tensor, oldest first
    base: Checkpoint | None = field(default=None, repr=False)
    from_nothing: bool = False  # whether the plan needs no base bits
    edges: tuple[int, ...] = ()  # number of the edge of each object

    @property
    def names(self) -> tuple[str]:
        return (self.spec.name,)

    def tensor_plans(self) -> "Iterator[TensorPlan]":
        yield self

    @property
    def needs_old(self) -> bool:
        name = self.spec.name
        return not self.from_nothing and any(part.needs_old(name) for part in self.parts)

    def read(
        self, low: int, high: int, old: Callable[[int, int], OldBits] | None = None
    ) -> TensorDelta:
        """Verify, inflate and decode the segments near the elements ``[low, high)``, folded."""
        name = self.spec.name
        deltas: list[TensorDelta] = []
        if self.base is not None:
            deltas.append(TensorDelta.run(self.spec, low, self.base.bits(name, low, high)))
        before: OldBits | None = None
        edges = self.edges or range(len(self.parts))
        for _, same in groupby(zip(edges, self.parts, strict=True), key=itemgetter(0)):
            parts = [part for _, part in same]
            if before is None and any(part.needs_old(name) for part in parts):
                before = self._before(deltas, low, high, old)
            read = [self._decode(part, (low, high), before) for part in parts]
            if before is not None and parts[-1] is not self.parts[-1]:
                before = before.after(read)
            deltas += (delta for delta in read if delta.nnz)
        empty = np.empty(0, np.int64), np.empty(0, self.spec.bits_dtype)
        found = (
            fold_within(deltas, low, high)
            if deltas
            else TensorDelta(spec=self.spec, indices=empty[0], values=empty[1])
        )
        if self.from_nothing and low < high and not found.covers(low, high):
            raise errors.BrokenChainError(
                f"{name}: the plan from nothing gives only {found.nnz} elements"
            )
        return found

    def windows(
        self, piece: Piece, old: Callable[[int, int], OldBits] | None = None
    ) -> Iterator[tuple[Piece, TensorDelta]]:
        """Decode a piece window by window, each delta without elements of others."""
        for window in piece.windows():
            _, low, high = window
            yield window, self.read(low, high, old).within(low, high)

    def _decode(self, part: Part, near: tuple[int, int], old: OldBits | None) -> TensorDelta:
        name = self.spec.name
        if old is None or not part.needs_old(name):
            return part.read(name, near)
        with nullcontext() if self.from_nothing else bits_are_at_fault(name):
            return part.read(name, near, old=old)

    def _before(
        self,
        deltas: Sequence[TensorDelta],
        low: int,
        high: int,
        old: Callable[[int, int], OldBits] | None,
    ) -> OldBits | None:
        # All elements of the segments near the wanted ones.
        start, stop = max(0, low - SEGMENT), min(self.spec.numel, high + SEGMENT)
        if old is not None and not self.from_nothing:
            before = old(start, stop)
        elif self.from_nothing:
            bits = np.zeros(stop - start, self.spec.bits_dtype)
            before = OldBits(bits, start, np.zeros(stop - start, np.bool_))
        else:
            return None
        return before.after(deltas)

    def steps(
        self, low: int, high: int, old: Callable[[int, int], OldBits] | None = None
    ) -> TensorReader | None:
        """Return the reader of the segments near ``[low, high)`` if one object has steps of all.

        ``None`` for a tensor plan that has to be folded, or is stored otherwise.
        """
        (part, *more), name = self.parts or (None,), self.spec.name
        if part is None or more or self.base is not None or self.from_nothing:
            return None
        if not ENCODINGS.get(part.rows[name].encoding).stages:
            return None
        before = self._before((), low, high, old) if part.needs_old(name) else None
        return part.reader(name, (low, high), old=before)
