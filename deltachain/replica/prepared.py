"""The leader's record of a swap that the ranks of its replica have staged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from deltachain.chain.fetch import Fetched
from deltachain.errors import BaseMismatchError
from deltachain.replica.messages import StagedReply
from deltachain.replica.spool import Spool
from deltachain.replica.unused_state import UnusedState
from deltachain.subscribe.proof import Effect


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


def add_up(replies: Sequence[StagedReply], fetched: Fetched) -> tuple[Effect, bool]:
    """Add up the effects of all ranks; return too whether ranks with equal elements had equal ones.

    Raises:
        BaseMismatchError: Ranks with the same elements would hold different bits afterwards.
    """
    effects: dict[str, Effect] = {}
    alike = True
    for reply in replies:
        for label, effect in reply.effects:
            first = effects.setdefault(label, effect)
            alike = alike and effect == first
            ends_alike = fetched.from_nothing and effect.written == first.written
            if effect != first and not ends_alike:
                raise BaseMismatchError(
                    f"ranks {label} hold different bits of the same elements",
                    version=fetched.plan.target,
                )
    return sum(effects.values(), Effect()), alike
