"""Measurement of small requests, to calibrate a simulation."""

from __future__ import annotations

import time
from typing import Final

from deltachain.bench.reach.settings import RequestTimes
from deltachain.bench.store import scratch

COUNT: Final = 200
"""Requests measured."""

NBYTES: Final = 4096
"""Size of the object that is read, in bytes: that of a manifest."""


def measure(url: str, count: int = COUNT) -> RequestTimes:
    """Time reads of a small object, and remove it.

    Args:
        url: URL of a store; a new prefix below it is used.
        count: Number of reads.

    Raises:
        StoreError: The store failed.
    """
    with scratch(url) as store:
        store.put("times/object", b"x" * NBYTES)
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            store.get("times/object")
            seconds.append(time.perf_counter() - start)
    return RequestTimes(tuple(seconds))
