"""What the leader of a replica keeps of a swap that its ranks have staged."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from deltachain.replica.spool import Spool
from deltachain.replica.unused_state import UnusedState


class TicketLease:
    """Keeps a ticket and its spool: the ranks keep both as long as the leader holds the lease."""

    def __init__(self, ticket: int, spool: Spool) -> None:
        self.ticket = ticket
        self.spool = spool


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class PreparedSwap:
    """A swap that all ranks have staged; see :class:`Prepared`.

    Attributes:
        nnz: Elements that are written, on whichever rank.
        nbytes: Bytes kept by the rank that keeps most.
        base_too: Whether what is overwritten is proven as well.
        can_undo: Whether every rank keeps every old bit.
        unused: What tensors that no rank holds add to the digest, before the swap and after.
        back: Whether it is taken back rather than written.
        lease: Of its ticket; shared with its undo.
    """

    nnz: int
    nbytes: int
    base_too: bool
    can_undo: bool
    unused: tuple[UnusedState, UnusedState]
    back: bool = False
    lease: TicketLease = field(repr=False)

    @property
    def ticket(self) -> int:
        """Number under which every rank keeps what it staged."""
        return self.lease.ticket

    def undo(self) -> PreparedSwap:
        """The swap that takes it back."""
        return replace(self, back=not self.back)

    @property
    def unused_after(self) -> UnusedState:
        """What tensors that no rank holds add once it is done."""
        before, after = self.unused
        return before if self.back else after
