"""The clock of a server, as its answers tell it."""

from __future__ import annotations

import pytest

from deltachain.store.base import ServerClock


def test_it_goes_on_between_answers() -> None:
    elapsed = [5.0]
    clock = ServerClock(lambda: elapsed[0])
    assert clock.now() is None
    clock.hear("Mon, 23 Nov 2026 15:00:00 GMT")
    elapsed[0] += 90
    assert clock.now() == 1_795_446_000 + 90


@pytest.mark.parametrize("date", [None, "", "now", "Mon, 99 Nov 2026 15:00:00 GMT", "\x00" * 99])
def test_what_is_no_date_changes_nothing(date: str | None) -> None:
    clock = ServerClock(lambda: 0.0)
    clock.hear("Mon, 23 Nov 2026 15:00:00 GMT")
    clock.hear(date)
    assert clock.now() == 1_795_446_000
