"""Old bits of a tensor, which an encoding may need to locate the changed elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from deltachain.delta import TensorDelta, new_bits
from deltachain.types import Bits


@dataclass(frozen=True, slots=True, eq=False)
class OldBits:
    """Bits of consecutive elements of a tensor before a change.

    Attributes:
        bits: ``(n,)`` unsigned integers of the element's width.
        start: Flat index of the first one.
        held: ``(n,)`` bool, whether the bits of an element are known; ``None`` if all are.
        shared: Whether the bits are live weights, or others that must not be written.
    """

    bits: Bits
    start: int = 0
    held: npt.NDArray[np.bool_] | None = None
    shared: bool = False

    @property
    def stop(self) -> int:
        """Flat index after the last one."""
        return self.start + int(self.bits.size)

    def after(self, deltas: Sequence[TensorDelta]) -> OldBits:
        """Return the bits after some deltas: these themselves, unless they are shared."""
        if not deltas:
            return self
        found = replace(self, bits=self.bits.copy(), shared=False) if self.shared else self
        for delta in deltas:
            found._apply_(delta)
        return found

    def _apply_(self, delta: TensorDelta) -> None:
        """Write what a delta gives of these elements; they are then the bits after it."""
        if delta.indices is None:
            first, last = max(delta.start, self.start), min(delta.start + delta.nnz, self.stop)
            if first < last:
                there = slice(first - self.start, last - self.start)
                self.bits[there] = delta.values[first - delta.start : last - delta.start]
                if self.held is not None:
                    self.held[there] = True
            return
        near = slice(*np.searchsorted(delta.indices, [self.start, self.stop]).tolist())
        at = delta.indices[near] - self.start
        absolute = delta.absolute[near] if delta.absolute.ndim else delta.absolute
        self.bits[at] = new_bits(self.bits[at], delta.values[near], absolute)
        if self.held is not None:
            self.held[at] |= absolute
