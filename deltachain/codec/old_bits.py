"""Old bits of a tensor, which an encoding may need to locate the changed elements."""

from __future__ import annotations

from dataclasses import dataclass

from deltachain.types import Bits


@dataclass(frozen=True, slots=True, eq=False)
class OldBits:
    """Bits of consecutive elements of a tensor before a change.

    Attributes:
        bits: ``(n,)`` unsigned integers of the element's width; not written.
        start: Flat index of the first one.
    """

    bits: Bits
    start: int = 0

    @property
    def stop(self) -> int:
        """Flat index after the last one."""
        return self.start + int(self.bits.size)
