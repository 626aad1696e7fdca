"""Numbered records: documents under consecutive keys, of which the newest counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from deltachain.store import Store

WIDE: Final = 16
"""Keys looked up by one request, in stores that look up many."""

LIMIT: Final = 10**8
"""Number of keys, since numbers have eight digits."""

NONE: Final = -1
"""Number of the newest record where there is none."""


def newest_number(store: Store, key: Callable[[int], str], *, known: int = NONE) -> int:
    """Find the largest number of a record, in O(log n) lookups.

    Searches by doubling and bisection. Records that were lost below the newest one hide it only if
    every number that was looked up above them is lost as well.

    Args:
        store: Store of the records, numbered from 0.
        key: Function that returns the key of a number.
        known: Number of a record that exists; -1 for none.

    Returns:
        The number; -1 if there is no record.
    """
    width = min(store.capabilities.probes, WIDE)
    low, high, leap = known, LIMIT, 0
    while high - low > 1:
        if high == LIMIT:  # no record is known to be absent
            asked = [known + (1 << (leap + n)) for n in range(width)]
            asked, leap = [number for number in asked if number < LIMIT], leap + width
            if not asked:
                return low
        else:
            step = max(1, (high - low) // (width + 1))
            asked = list(range(low + step, high, step))[:width]
        found = store.find_all(map(key, asked))
        low = max((number for number in asked if key(number) in found), default=low)
        absent = (number for number in asked if key(number) not in found)
        high = min((number for number in absent if number > low), default=high)
    return low
