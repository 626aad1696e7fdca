"""What a mirror says of itself: whether it does its work, and how long its source is silent."""

from __future__ import annotations

import time

import pytest

from deltachain.errors import StoreUnavailableError
from deltachain.mirror import Mirror
from deltachain.mirror.figures import MirrorTotals
from deltachain.presence.statuses import mirror_status
from deltachain.store import MemoryStore
from tests.unit.mirror.conftest import Grow

GIVEN = {"MAX_SILENCE_S": 60.0, "MAX_LAG": 2}


class Answering(MemoryStore):
    """A source that says since when a request has no answer."""

    waits_since: float | None = None

    @property
    def unanswered_since(self) -> float | None:
        return self.waits_since


@pytest.fixture
def totals(monkeypatch: pytest.MonkeyPatch) -> MirrorTotals:
    """Totals of a mirror that began two minutes ago."""
    made = MirrorTotals()
    monkeypatch.setattr(made, "_since", time.monotonic() - 120)
    return made


def test_a_mirror_that_is_cut_off_from_its_source_is_not_ready(
    source: MemoryStore, mirror_store: MemoryStore, grow: Grow, totals: MirrorTotals
) -> None:
    grow(1)
    mirror = Mirror(source, mirror_store)
    assert mirror_status(mirror, totals, GIVEN, url="x").reason.startswith("it holds no version")
    for receipt in mirror.catch_up():
        totals.count(receipt)
    assert mirror_status(mirror, totals, GIVEN, url="x").ready
    totals._since -= 61
    totals.looked(StoreUnavailableError("nobody answers"))
    status = mirror_status(mirror, totals, GIVEN, url="x")
    assert "its store has not answered for 61 s" in status.reason
    assert mirror_status(mirror, totals, {}, url="x").ready
    totals.looked(None)
    assert mirror_status(mirror, totals, GIVEN, url="x").ready


def test_a_long_copy_is_no_silence(mirror_store: MemoryStore, totals: MirrorTotals) -> None:
    source = Answering()
    mirror = Mirror(source, mirror_store)
    assert totals.silence_of(mirror) > 60
    mirror.is_copying = True
    assert totals.silence_of(mirror) == 0.0
    source.waits_since = time.monotonic() - 90
    assert totals.silence_of(mirror) > 60


def test_a_mirror_says_while_it_copies(
    source: MemoryStore, mirror_store: MemoryStore, grow: Grow
) -> None:
    grow(3)
    mirror = Mirror(source, mirror_store)
    receipts = mirror.catch_up()
    next(receipts)
    assert mirror.is_copying
    assert len(list(receipts)) == 3
    assert not mirror.is_copying
