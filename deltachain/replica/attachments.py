"""Leaders of a rank: the one that is obeyed, and the next one while it attaches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from deltachain.errors import LeaderReplacedError
from deltachain.replica.messages import AgreeRequest, FindUnusedRequest, RankRequest
from deltachain.replica.rank import Rank
from deltachain.types import TensorSpec

ATTACHING: Final = (FindUnusedRequest, AgreeRequest)
"""Requests of a leader that is not in charge yet: any rank may still refuse it."""


@dataclass(slots=True)
class Lead:
    """What one leader has attached.

    Attributes:
        leader: Id of the leader; empty for none.
        rank: The rank, laid out for the leader's chain; ``None`` before the first attach.
        url: URL of the chain.
        wanted: Elements of each tensor that this host needs; empty for all.
    """

    leader: str = ""
    rank: Rank | None = None
    url: str = ""
    wanted: Mapping[str, tuple[int, int]] = field(default_factory=dict)


class Attachments:
    """The leader in charge, and the next one.

    The next one takes over by its first request that is not in ``ATTACHING``, which it sends once
    all ranks have agreed. If one of them refuses, the leader in charge stays so.
    """

    def __init__(self) -> None:
        self._current = Lead()
        self._next: Lead | None = None

    def add(self, attachment: Lead) -> None:
        """Add the next leader; it is in charge at once if there was none."""
        if self._current.rank is None:
            self._current = attachment
        else:
            self._next = attachment

    def of(self, request: RankRequest) -> Lead:
        """Return what the leader of a request has attached.

        Raises:
            LeaderReplacedError: Another leader is in charge.
        """
        if self._next is not None and request.leader == self._next.leader:
            if isinstance(request, ATTACHING):
                return self._next
            self._current, self._next = self._next, None
        if request.leader != self._current.leader:
            raise LeaderReplacedError("another leader has attached this rank since")
        return self._current

    def rank_for(self, specs: Iterable[TensorSpec], aliases: Mapping[str, str]) -> Rank | None:
        """Return a rank that is laid out for these tensors already; ``None`` for none."""
        ranks = [one.rank for one in (self._current, self._next) if one is not None]
        return next((rank for rank in ranks if rank and rank.is_for(specs, aliases)), None)
