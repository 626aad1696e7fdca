"""Figures of a subscriber, for metrics."""

from __future__ import annotations

from collections.abc import Iterator

from deltachain.figures import Figure, figures, info, phases
from deltachain.status import lag
from deltachain.subscribe.receipt import Tally
from deltachain.subscribe.subscriber import Subscriber
from deltachain.types import Version


def subscriber_figures(
    subscriber: Subscriber,
    tally: Tally,
    *,
    engine: str,
    newest: Version | None = None,
    follows: bool = True,
) -> Iterator[Figure]:
    chain, held, last = subscriber.opened, subscriber.held, subscriber.last
    times, version = subscriber.times, held.version if held else None
    head = newest if newest is not None else chain.latest if chain else None
    yield info(engine=engine, chain=chain.identity.chain if chain else None)
    yield from figures(
        {
            "version": version,
            "head_version": head,
            "lag_versions": lag(head, version),
            "pinned": subscriber.pinned,
            "poisoned": subscriber.poisoned,
            "last_look_timestamp_seconds": times.looked_at,
            "last_apply_timestamp_seconds": times.applied_at,
            "commit_timestamp_seconds": times.commit_of(held.manifest) if held else None,
            "silence_seconds": times.silence_s if follows else None,
            "applies": tally.applies,
            "failures": tally.failures,
            "fetched_bytes": tally.nbytes,
            "written_elements": tally.nnz,
            "fetch_seconds": tally.fetch_s,
            "stage_seconds": tally.stage_s,
            "swap_seconds": tally.swap_s,
            "pause_seconds": tally.pause_s,
            "store_requests": chain.store.requests if chain else 0,
        }
    )
    yield from phases(last.phases if last else {})
