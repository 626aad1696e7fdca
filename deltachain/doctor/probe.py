"""Trial of a store: latency, and for a publisher its writes, its conditional writes and its clock.

What is written lies under keys of its own (``trials/``), and is removed, whatever happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from statistics import median
from threading import Barrier
from typing import Final
from uuid import uuid4

from deltachain.doctor.finding import Finding, failed, fault, note, ok
from deltachain.errors import (
    AlreadyExistsError,
    DeltaChainError,
    StorePermissionError,
    StoreUnavailableError,
)
from deltachain.format.keys import CHAIN_KEY, trial_key
from deltachain.store import ObjectInfo, Store
from deltachain.threads import Pool

STORE: Final = "store"
WRITES: Final = "writes"
CLOCK: Final = "clock"

LOOKS: Final = 5
"""Requests of which the median latency is told."""

RACERS: Final = 8
"""Concurrent conditional writes of one key."""

SLOW_S: Final = 2.0
"""Latency beyond which a request is told to be slow, in seconds."""

SKEW_S: Final = 60.0
"""Difference of clocks that is a fault, in seconds: ages of heartbeats and times of prunes are
compared across machines."""

_READS: Final = "enough to follow; a publisher needs credentials that may write here"


def probe_latency(store: Store) -> Finding:
    """Measure a request.

    Raises:
        DeltaChainError: The store does not answer, or refuses.
    """
    times = []
    for _ in range(LOOKS):
        start = time.monotonic()
        store.find(CHAIN_KEY)
        times.append(time.monotonic() - start)
    latency = median(times)
    said = f"{store.url} answers in {latency * 1e3:.1f} ms"
    if latency > SLOW_S:
        return note(STORE, said, "versions arrive late: use a store or a mirror that is closer")
    return ok(STORE, said)


def probe_writes(store: Store, now: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Write, write again conditionally, race, read and remove.

    Args:
        store: The store.
        now: This machine's clock, in seconds since 1970.
    """
    name = uuid4().hex
    single, raced = trial_key(f"{name}-single"), trial_key(f"{name}-raced")
    try:
        found = list(_probe_single(store, single, now))
        yield from found
        if all(one.check != WRITES for one in found):  # else it is known not to decide
            yield _probe_race(store, raced)
    except StorePermissionError as exc:
        yield fault(WRITES, f"nothing can be written: {exc.args[0]}", _READS)
    except DeltaChainError as exc:
        yield failed(WRITES, exc)
    finally:
        left = [key for key in (single, raced) if not _removed(store, key)]
    if left:
        keys = " and ".join(left)
        yield note(WRITES, f"{keys} cannot be removed", "allow deletion, or remove them by hand")


def _probe_single(store: Store, key: str, now: Callable[[], float]) -> Iterator[Finding]:
    before = now()
    store.put_if_absent(key, b"first")
    after = now()
    info = store.find(key)
    try:
        store.put_if_absent(key, b"second")
    except AlreadyExistsError:
        pass
    else:
        yield _overwrites(store)
        return
    if store.get(key) != b"first":
        yield fault(
            WRITES,
            f"{store.url} does not return what was written",
            "look for a cache or a proxy before the store",
        )
    if info is None or info.modified is None:
        yield note(CLOCK, f"{store.url} does not tell when an object was written")
    else:
        yield clocks(ahead_s=_distance(info.modified, before - 1.0, after + 1.0))


def compare_clocks(
    store: Store, newest: ObjectInfo | None, now: Callable[[], float] = time.time
) -> Iterator[Finding]:
    """Compare this machine's clock with the store's, without a write; yield a difference.

    Args:
        store: The store, which has answered.
        newest: The newest manifest, which the store's clock cannot be behind; ``None`` for none.
        now: As of :func:`probe_writes`.
    """
    told = store.clock()
    ahead_s = 0.0 if told is None else _distance(told, now() - 2.0, now() + 1.0)
    if newest is not None and newest.modified is not None and newest.modified > now() + 1.0:
        ahead_s = max(ahead_s, newest.modified - now())
    if ahead_s:
        yield clocks(ahead_s=ahead_s)


def _distance(moment: float, first: float, last: float) -> float:
    """Return how far a moment is after ``last`` or, below 0, before ``first``; else 0.

    Stores tell times in whole seconds, hence the second on both sides.
    """
    return max(0.0, moment - last) or min(0.0, moment - first)


def clocks(*, ahead_s: float) -> Finding:
    """Judge by how many seconds the store's clock is ahead of this machine's."""
    if abs(ahead_s) < 1:
        return ok(CLOCK, "this machine's clock agrees with the store's")
    order = "behind" if ahead_s > 0 else "ahead of"
    said = f"this machine's clock is {abs(ahead_s):,.0f} s {order} the store's"
    hint = "set the clock of this machine, by NTP for example"
    return (fault if abs(ahead_s) > SKEW_S else note)(CLOCK, said, hint)


def _probe_race(store: Store, key: str) -> Finding:
    if not store.capabilities.conditional_put:
        return note(
            WRITES,
            f"{store.url} takes writes, and cannot decide between two publishers",
            "start a single publisher; a Hub bucket decides with keys of its S3 gateway",
        )
    start = Barrier(RACERS)

    def race(number: int) -> bool:
        with suppress(Exception):  # without threads for all, those that there are race
            start.wait(5)
        try:
            store.put_if_absent(key, str(number).encode())
        except (AlreadyExistsError, StoreUnavailableError):
            return False
        return True

    with Pool(RACERS) as pool:
        winners = sum(pool.map(race, range(RACERS)))
    if winners != 1:
        return _overwrites(store, f"{winners} of {RACERS} concurrent writers were told to have won")
    return ok(WRITES, f"one of {RACERS} concurrent conditional writes won, as it must")


def _overwrites(store: Store, why: str = "it overwrites objects that are there") -> Finding:
    return fault(
        WRITES,
        f"{store.url} does not keep its promise of conditional writes: {why}",
        "two publishers could both commit a version: use a release of the server that holds "
        "If-None-Match, or another store",
    )


def _removed(store: Store, key: str) -> bool:
    try:
        store.delete(key)
        return store.find(key) is None
    except DeltaChainError:
        return False
