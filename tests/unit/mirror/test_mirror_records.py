"""Edge records of a source that come back, are made again, or are signed later."""

from __future__ import annotations

import logging

import pytest

from deltachain.chain.chain import Chain
from deltachain.format.documents import EdgeRecord, unseal
from deltachain.format.keys import edge_key
from deltachain.maintain import Maintainer
from deltachain.mirror import Mirror
from deltachain.mirror import mirror as loop
from deltachain.store import MemoryStore
from tests.hostile.signed import OWNER, Author, resign, trust_of
from tests.unit.maintain.grown import Grown
from tests.unit.maintain.test_prune import payloads

SKIP = edge_key(16, "skip", 8)


@pytest.fixture(autouse=True)
def _surveys_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SURVEY", 1)


@pytest.fixture
def grown() -> Grown:
    """A chain whose skips no manifest lists."""
    made = Grown(MemoryStore())
    made.grow(40)
    Maintainer(Chain.open(made.store), None).round()
    return made


def make_again(grown: Grown, key: str) -> None:
    """Lose an edge record; a maintainer makes another one, with parts of its own."""
    before = grown.store.get(key)
    grown.store.delete(key)
    Maintainer(Chain.open(grown.store), None).round()
    assert grown.store.get(key) != before


class Hiding(MemoryStore):
    """A store that lists an object, and does not have it when it is read."""

    hidden = ""

    def get(self, key: str, *, limit: int = 1 << 26) -> bytes:
        if key == self.hidden:
            self.delete(key)
        return super().get(key, limit=limit)


def test_a_record_that_comes_back_is_copied(caplog: pytest.LogCaptureFixture) -> None:
    grown, there = Grown(Hiding()), MemoryStore()
    grown.grow(40)
    Maintainer(Chain.open(grown.store), None).round()
    data = grown.store.get(SKIP)
    assert isinstance(grown.store, Hiding)
    grown.store.hidden = SKIP
    mirror = Mirror(grown.store, there)
    list(mirror.catch_up())
    assert f"{SKIP} is gone from" in caplog.text
    assert there.find(SKIP) is None
    grown.store.hidden = ""
    grown.store.put(SKIP, data)
    list(mirror.catch_up())
    assert there.get(SKIP) == data
    assert payloads(there) == payloads(grown.store)


def test_a_record_that_is_signed_later_is_copied(caplog: pytest.LogCaptureFixture) -> None:
    """Until then it is named once."""
    author, there = Author(OWNER).grow(3).anchor(), MemoryStore()
    source, key = author.store, edge_key(2, "anchor", None)
    data = source.get(key)
    resign(source, key, [])
    mirror = Mirror(source, there, trust=trust_of(1))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            list(mirror.catch_up())
    assert there.find(key) is None
    assert [key in message for message in caplog.messages] == [True]
    source.put(key, data)
    list(mirror.catch_up())
    assert there.get(key) == data


@pytest.mark.parametrize("restarts", [False, True])
def test_a_record_that_was_made_again_ends_no_mirror(
    grown: Grown, caplog: pytest.LogCaptureFixture, restarts: bool
) -> None:
    """The mirror keeps the first one, which leads to the same state, and says so once."""
    there = MemoryStore()
    mirror = Mirror(grown.store, there)
    list(mirror.catch_up())
    first = there.get(SKIP)
    make_again(grown, SKIP)
    mirror = Mirror(grown.store, there) if restarts else mirror
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            grown.grow(1)
            list(mirror.catch_up())
    assert mirror.version == grown.head
    assert there.get(SKIP) == first
    assert [SKIP in message for message in caplog.messages] == [True]
    parts = unseal(first, EdgeRecord, key=SKIP).edge.parts
    assert parts
    assert {part.key for part in parts} <= payloads(there).keys()


def test_a_damaged_record_of_the_mirror_is_named(
    grown: Grown, caplog: pytest.LogCaptureFixture
) -> None:
    there = MemoryStore()
    list(Mirror(grown.store, there).catch_up())
    there.put(SKIP, b"{}")
    there.delete(next(key for key in payloads(there) if key.startswith(f"skips/{16:020d}")))
    mirror = Mirror(grown.store, there)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            list(mirror.catch_up())
    assert there.get(SKIP) == b"{}"
    assert [SKIP in message for message in caplog.messages] == [True]
