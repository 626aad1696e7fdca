"""Figures of a replica, for metrics."""

from __future__ import annotations

from collections.abc import Iterator

from deltachain.figures import Figure, figures
from deltachain.replica.leader import Leader
from deltachain.subscribe.figures import subscriber_figures


def replica_figures(leader: Leader) -> Iterator[Figure]:
    """Yield the figures of a replica, from memory."""
    status = leader.status()
    yield from subscriber_figures(
        leader.subscriber,
        leader.tally,
        engine=leader.engine.software,
        newest=leader.newest,
        follows=status.following,
    )
    yield from figures({"ready": status.ready, "paused": status.paused})
