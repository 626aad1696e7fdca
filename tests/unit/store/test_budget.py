from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltachain.store.hf.api import Budget


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 100.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        with self._lock:
            self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def budget(clock: Clock, calls: int, window_s: float) -> Budget:
    return Budget(calls, window_s, clock=clock, sleep=clock.sleep)


def test_requests_wait_only_beyond_the_budget(clock: Clock) -> None:
    spending = budget(clock, 5, 300)
    assert [spending.take(0) for _ in range(5)] == [0.0] * 5
    assert clock.now == 100


def test_next_request_waits_for_the_oldest_to_leave(clock: Clock) -> None:
    spending = budget(clock, 2, 10)
    for at in (100, 104):
        clock.now = at
        assert spending.take(0) == 0
    assert spending.take(60) == 0
    assert clock.now == 110
    assert spending.take(60) == 0
    assert clock.now == 114


def test_what_left_unasked_counts_for_those_that_come_after(clock: Clock) -> None:
    spending = budget(clock, 3, 10)
    assert spending.take(0) == 0
    spending.charge(3)
    assert spending.take(0) == 10
    assert spending.take(60) == 0
    assert clock.now == 110


def test_wait_beyond_the_limit_is_told_and_not_begun(clock: Clock) -> None:
    spending = budget(clock, 1, 300)
    assert spending.take(0) == 0
    clock.now = 150
    assert spending.take(60) == 250
    assert clock.now == 150
    clock.now = 400
    assert spending.take(0) == 0  # what was refused was not accounted for


def test_no_stretch_has_more_requests_than_allowed(clock: Clock) -> None:
    spending = budget(clock, 7, 30)
    sent: list[float] = []
    for number in range(100):
        clock.sleep(0.1 + number * 7919 % 13 / 3)
        assert spending.take(1000) == 0
        sent.append(clock.now)
    gaps = [later - first for first, later in zip(sent, sent[7:], strict=False)]
    assert min(gaps) >= 30
    assert min(gaps) < 31  # it waits no longer than it has to


def test_threads_share_one_budget() -> None:
    spending = Budget(50, 300)
    with ThreadPoolExecutor(8) as pool:
        waits = list(pool.map(lambda _: spending.take(0), range(200)))
    assert waits.count(0.0) == 50
    assert all(290 < wait <= 300 for wait in waits if wait)
