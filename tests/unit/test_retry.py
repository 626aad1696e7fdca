from __future__ import annotations

import time

import pytest

from deltachain.retry import SLOWEST, Backoff, Deadline, shortly_after


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its one element is the time; sleeping takes none but that."""
    now = [1000.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    return now


def test_it_ends_once_nothing_moved_for_long(clock: list[float]) -> None:
    deadline = Deadline("a", "s3://b", 10, 100 * SLOWEST)
    for _ in range(5):
        clock[0] += 9
        deadline.moved()
    clock[0] += 11
    assert deadline.left_s < 0
    assert not deadline.pause(0)
    with pytest.raises(TimeoutError):
        deadline.moved()
    error = deadline.error("too slow")
    assert (error.key, error.url) == ("a", "s3://b")
    assert "given up after 56.0 s" in str(error)


def test_it_ends_though_bytes_move_if_they_are_too_few(clock: list[float]) -> None:
    deadline = Deadline("a", "s3://b", 10, 5 * SLOWEST)
    clock[0] += 9
    deadline.moved()
    clock[0] += 5.5
    deadline.moved()
    clock[0] += 1
    with pytest.raises(TimeoutError, match="too slow"):
        deadline.moved()


def test_pauses_fit_what_is_left(clock: list[float]) -> None:
    deadline = Deadline("a", "s3://b", 7)
    assert deadline.pause(5)
    assert deadline.pause(5)
    assert clock[0] == 1007
    assert not deadline.pause(5)
    assert clock[0] == 1007


@pytest.mark.parametrize("share", [1.0, 0.5, 0.4])
def test_pauses_are_drawn_from_a_range_that_doubles_up_to_a_bound(share: float) -> None:
    pauses = Backoff(0.1, 5.0, random_share=share)
    for failures, longest in ((0, 0.1), (1, 0.2), (3, 0.8), (10, 5.0), (10_000, 5.0)):
        least = longest * (1 - share)
        drawn = [pauses.pause_s(failures) for _ in range(2000)]
        assert least <= min(drawn) < least + 0.1 * longest
        assert longest - 0.1 * longest * share < max(drawn) <= longest


def test_a_wait_that_does_not_fit_is_not_begun(clock: list[float]) -> None:
    deadline = Deadline("a", "hf://b", 7)
    assert deadline.pause(1.0, 5.0)
    assert not deadline.pause(1.0, 3.0)
    assert clock[0] == 1005


def test_callers_that_wait_for_one_moment_come_apart() -> None:
    drawn = [shortly_after(10.0) for _ in range(2000)]
    assert 10 < min(drawn) < 10.2
    assert 10.4 < max(drawn) < 10.7
