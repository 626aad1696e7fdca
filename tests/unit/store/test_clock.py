"""The clock of a server, as its answers tell it."""

from __future__ import annotations

import time

import pytest

from deltachain.retry import Backoff
from deltachain.store.calls import Calls

DATE = "Mon, 23 Nov 2026 15:00:00 GMT"


@pytest.fixture
def calls() -> Calls:
    return Calls("s3://bucket", Backoff(0.1, 1.0))


def test_it_goes_on_between_answers(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    elapsed = [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: elapsed[0])
    assert calls.now() is None
    calls.hear(DATE)
    elapsed[0] += 90
    assert calls.now() == 1_795_446_000 + 90


@pytest.mark.parametrize("date", [None, "", "now", "Mon, 99 Nov 2026 15:00:00 GMT", "\x00" * 99])
def test_what_is_no_date_changes_nothing(calls: Calls, date: str | None) -> None:
    calls.hear(DATE)
    calls.hear(date)
    assert calls.now() == pytest.approx(1_795_446_000, abs=60)
