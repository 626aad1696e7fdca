"""Replicas that are told together: some late, some gone, some ahead."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from deltachain.control.fleet import Fleet
from deltachain.errors import ConfigError
from deltachain.replica.leader import Leader
from tests.unit.control.replicas import app_of, followed, leader_of, served
from tests.unit.replica.replicas import Followed

GONE = "http://127.0.0.1:9"


@pytest.fixture
def heres(tmp_path: Path) -> Iterator[list[tuple[Followed, Leader]]]:
    """Three engines, each of a trainer of its own."""
    with ExitStack() as stack:
        made = []
        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            here = stack.enter_context(contextmanager(followed)(folder))
            made.append((here, stack.enter_context(contextmanager(leader_of)(here))))
        yield made


def test_all_hold_it_before_the_trainer_goes_on(heres: list[tuple[Followed, Leader]]) -> None:
    with ExitStack() as stack:
        urls = [stack.enter_context(served(app_of(leader, is_open=True))) for _, leader in heres]
        with Fleet(urls) as fleet:
            for version in (1, 2):
                announced = fleet.announce(version)
                assert announced.enough
                assert (announced.stragglers, announced.held) == ((), dict.fromkeys(urls, version))
                assert all(here.holds(version) for here, _ in heres)
            assert fleet.announce(2).waited_s < 1  # known already


@pytest.mark.parametrize(
    ("wait", "enough", "deadline"),
    [("all", False, 3.0), ("quorum", True, 30.0), ("any", True, 30.0)],
)
def test_the_trainer_is_not_held_past_the_deadline(
    heres: list[tuple[Followed, Leader]], wait: str, enough: bool, deadline: float
) -> None:
    with ExitStack() as stack:
        urls = [stack.enter_context(served(app_of(one, is_open=True))) for _, one in heres[:2]]
        fleet = stack.enter_context(Fleet([*urls, GONE]))
        start = time.monotonic()
        announced = fleet.announce(1, wait=wait, deadline=deadline)  # type: ignore[arg-type]
        assert announced.enough is enough
        assert time.monotonic() - start < deadline + 20.0
        assert GONE in announced.stragglers
        if wait == "all":
            assert "did not answer" in announced.trouble[GONE]
            assert GONE in str(announced)


def test_a_replica_that_fell_back_is_asked_again(heres: list[tuple[Followed, Leader]]) -> None:
    (_, before), (here, after), _ = heres
    with served(app_of(before, is_open=True)) as url, Fleet([url]) as fleet:
        assert fleet.announce(2).enough
        before.update, before.status = after.update, after.status  # type: ignore[method-assign]
        assert not here.holds(2)
        assert fleet.announce(2).enough
        assert here.holds(2)


def test_nobody_waits_for_none(heres: list[tuple[Followed, Leader]]) -> None:
    here, leader = heres[0]
    with served(app_of(leader, is_open=True)) as url, Fleet([url]) as fleet:
        assert fleet.announce(2, wait="none").enough
        assert fleet.announce(2).stragglers == ()
        assert here.holds(2)


def test_a_replica_that_was_away_is_told_the_newest(heres: list[tuple[Followed, Leader]]) -> None:
    here, leader = heres[0]
    app = app_of(leader, is_open=True)
    with served(app) as url:
        port = int(url.rpartition(":")[2])
    with Fleet([url]) as fleet:
        assert not fleet.announce(1, deadline=0.5).enough
        assert not fleet.announce(2, deadline=0.5).enough
        with served(app, port):
            assert fleet.announce(2, deadline=30).enough
        assert here.holds(2)


def test_a_replica_that_is_ahead_is_no_straggler(heres: list[tuple[Followed, Leader]]) -> None:
    here, leader = heres[0]
    leader.update(2)
    with served(app_of(leader, is_open=True)) as url, Fleet([url]) as fleet:
        announced = fleet.announce(1, deadline=20)
        assert (announced.enough, announced.held[url]) == (True, 2)
    assert here.holds(2)


def test_a_replica_that_a_rollback_keeps_is_named(heres: list[tuple[Followed, Leader]]) -> None:
    _, leader = heres[0]
    leader.update(0)
    leader.update(1)
    leader.rollback(0)
    with served(app_of(leader, is_open=True)) as url, Fleet([url]) as fleet:
        announced = fleet.announce(2, deadline=1.0)
        assert announced.stragglers == (url,)
        assert "rollback" in announced.trouble[url]


def test_one_that_hangs_holds_up_no_other(heres: list[tuple[Followed, Leader]]) -> None:
    with ExitStack() as stack:
        urls = [stack.enter_context(served(app_of(one, is_open=True))) for _, one in heres[:2]]
        slow = heres[0][1]
        lock = slow.subscriber.alone()
        fleet = stack.enter_context(Fleet(urls))
        with lock:  # nothing is swapped there meanwhile
            announced = fleet.announce(1, deadline=2.0)
            assert (announced.stragglers, announced.held[urls[1]]) == ((urls[0],), 1)
        assert fleet.announce(1, deadline=30).enough


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        Fleet([GONE, GONE])
    with Fleet([]) as fleet:
        assert fleet.announce(1).enough
        with pytest.raises(ConfigError, match="quorum"):
            fleet.announce(1, wait="most")  # type: ignore[arg-type]
