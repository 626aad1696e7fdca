"""What the leader of a replica keeps of an apply that its ranks have staged."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from deltachain.replica.spool import Spool
from deltachain.replica.unused_state import UnusedState


class Alive:
    """Lives as long as a ticket may still be used, and so does the spool behind it."""

    def __init__(self, number: int, spool: Spool) -> None:
        self.number = number
        self.spool = spool


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Ticket:
    """What the ranks keep of an apply; see :class:`Prepared`.

    Attributes:
        number: What they know it by.
        nnz: Elements that are written, on whichever rank.
        nbytes: Bytes that the rank with the most keeps.
        base_too: Whether what is overwritten is proven as well.
        can_undo: Whether every rank keeps every old bit.
        unused: What tensors that no rank holds add to the digest, before it and after.
        back: Whether it is taken back rather than written.
        alive: Shared by a ticket and its undo: while either lives, the ranks keep it.
    """

    number: int
    nnz: int
    nbytes: int
    base_too: bool
    can_undo: bool
    unused: tuple[UnusedState, UnusedState]
    back: bool = False
    alive: Alive = field(repr=False)

    def undo(self) -> Ticket:
        """The ticket for taking it back."""
        return replace(self, back=not self.back)

    @property
    def leaves(self) -> UnusedState:
        """What the tensors that no rank holds add once it is swapped."""
        before, after = self.unused
        return before if self.back else after
