"""Calls by which a leader has every host fetch a plan, and every rank stage it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from threading import Lock

from deltachain.chain.fetch import Fetched
from deltachain.replica.client import RankClient
from deltachain.replica.fetcher import Fetchers, receive
from deltachain.replica.messages import (
    FetchedReply,
    FetchRequest,
    StageRequest,
    StartedReply,
)
from deltachain.replica.prepared import TicketLease
from deltachain.replica.spool import Spool, SpoolIndex


class StageCalls:
    """Stages of a replica, and the leases of what its ranks keep.

    Args:
        client: Connection to the ranks.
        numbers: Numbers for tickets; none is used twice.

    Attributes:
        fetchers: Processes that fetch; set when the ranks are attached.
    """

    def __init__(self, client: RankClient, numbers: Iterator[int]) -> None:
        self.fetchers = Fetchers(())
        self._client, self._numbers = client, numbers
        self._asking = Lock()
        self._leases: weakref.WeakSet[TicketLease] = weakref.WeakSet()

    def drop(self, lease: TicketLease) -> None:
        """Let the ranks forget a stage at the next call."""
        self._leases.discard(lease)

    def everywhere(self, spool: Spool, fetched: Fetched, budget: int) -> TicketLease:
        """Have every rank stage while every host fetches; return once all objects are there.

        Raises:
            ApplyError: No rank of a host could fetch.
        """
        while True:
            lease, fetching = self._start_stage(spool, fetched, budget)
            try:
                receive(spool, fetched)
                if fetching is None:
                    return lease
                failed = self._client.settle(fetching, FetchedReply, fetched.plan.target)
                if not self.fetchers.replaced(failed, fetched.plan.target):
                    return lease
            except BaseException:
                self.drop(lease)  # an error in flight would keep it
                raise
            self.drop(lease)

    def _start_stage(
        self, spool: Spool, fetched: Fetched, budget: int
    ) -> tuple[TicketLease, int | None]:
        """Ask the fetchers of other hosts to fetch, and every rank to stage.

        Returns:
            The lease of the ticket, and the ticket of the fetchers; ``None`` without other hosts.
        """
        mine = spool.folder.name
        with self._asking:  # ranks must not be told to drop the ticket of a concurrent stage
            names, fetching = self._start_fetch(fetched)
            lease = TicketLease(next(self._numbers), spool)
            self._leases.add(lease)
            request = StageRequest(
                ticket=lease.ticket,
                spools=tuple(name or mine for name in names),
                ranks_on_host=self.fetchers.ranks_on_host(),
                budget=budget,
                keep=tuple(one.ticket for one in self._leases),
            )
            try:
                self._client.ask(request, StartedReply)
            except BaseException:
                self.drop(lease)
                raise
        return lease, fetching

    def _start_fetch(self, fetched: Fetched) -> tuple[tuple[str, ...], int | None]:
        """Ask the fetchers of other hosts to fetch; return the spools of all ranks, and a ticket.

        Raises:
            ApplyError: No rank of a host could begin.
        """
        while any(names := self.fetchers.names()):
            ticket, writers = next(self._numbers), self.fetchers.writers(names)
            fetch = FetchRequest(ticket=ticket, spools=writers, index=SpoolIndex.of(fetched))
            started = self._client.call(fetch, StartedReply)
            if not self.fetchers.replaced(started, fetched.plan.target):
                return names, ticket
        return names, None
