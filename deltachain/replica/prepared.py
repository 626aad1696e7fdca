"""The leader's record of a swap that the ranks of its replica have staged."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from deltachain.replica.spool import Spool
from deltachain.replica.unused_state import UnusedState


class TicketLease:
    """The lease of a ticket and its spool; the ranks keep both while the leader holds it."""

    def __init__(self, ticket: int, spool: Spool) -> None:
        self.ticket = ticket
        self.spool = spool


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class PreparedSwap:
    """A swap that all ranks have staged; see :class:`Prepared`.

    Attributes:
        nnz: Number of elements written, over all ranks.
        nbytes: Bytes kept by the rank that keeps most.
        base_too: Whether the overwritten bits are proven as well.
        can_undo: Whether every rank keeps every old bit.
        unused: Digests of the tensors that no rank holds, before the swap and after.
        back: Whether the swap undoes a write.
        lease: Lease of the ticket; shared with the undo.
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
        """Number under which every rank keeps its staged bits."""
        return self.lease.ticket

    def undo(self) -> PreparedSwap:
        """Return the swap that undoes this one."""
        return replace(self, back=not self.back)

    @property
    def unused_after(self) -> UnusedState:
        """Digests of the tensors that no rank holds, after the swap."""
        before, after = self.unused
        return before if self.back else after
