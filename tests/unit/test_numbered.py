"""The newest of numbered records, found in a handful of lookups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltachain.chain.lookup import NONE, newest_number
from deltachain.store import MemoryStore, ObjectInfo
from tests.unit.manifest_chains import WideStore


class CountingStore(MemoryStore):
    """One that counts what it is asked."""

    asked = 0

    def find(self, key: str) -> ObjectInfo | None:
        self.asked += 1
        return super().find(key)


def key(number: int) -> str:
    return f"tags/x/{number:08d}.json"


def numbered(store: MemoryStore, count: int) -> MemoryStore:
    for number in range(count):
        store.put(key(number), b"x")
    return store


@given(st.integers(0, 300), st.booleans())
def test_the_newest_is_found(count: int, wide: bool) -> None:
    store = numbered(WideStore() if wide else MemoryStore(), count)
    assert newest_number(store, key) == count - 1
    for known in range(0, count, 7):
        assert newest_number(store, key, known=known) == count - 1


@pytest.mark.parametrize("count", [0, 1, 2, 100, 5000])
def test_lookups_grow_with_the_logarithm(count: int) -> None:
    store = CountingStore()
    numbered(store, count)
    newest_number(store, key)
    assert store.asked <= 2 * count.bit_length() + 1
    wide = WideStore()
    numbered(wide, count)
    newest_number(wide, key)
    assert len(wide.looks) <= 4


def test_a_record_lost_below_the_newest_hides_nothing() -> None:
    store = numbered(WideStore(), 40)
    store.delete(key(5))
    assert newest_number(store, key) == 39


def test_a_store_that_says_yes_to_everything_comes_to_an_end() -> None:
    class Yes(MemoryStore):
        def find(self, key: str) -> ObjectInfo:
            return ObjectInfo(key=key, nbytes=0, modified=None)

    assert newest_number(Yes(), key) < 10**8
    assert NONE == -1
