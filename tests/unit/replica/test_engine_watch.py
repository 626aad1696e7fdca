"""Engines that hang, or are paused by others, while nobody asks anything of their replica."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from unittest import mock

import pytest

from deltachain.errors import ApplyError, LeaderReplacedError, PartialApplyError
from deltachain.replica import leader as engine_watch
from deltachain.replica.leader import EngineWatch, Leader
from deltachain.replica.target import PauseHolds
from deltachain.status import Status
from tests.support.engine import Sharding
from tests.unit.replica.replicas import Followed, eventually, led

EVERY_S = 0.01


@pytest.fixture
def watched_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Followed]:
    monkeypatch.setattr(engine_watch, "MAX_SILENCE_S", 0.2)
    found = Followed(Sharding(tp=2), tmp_path)
    yield found
    found.close()


@contextmanager
def watched(watched_ranks: Followed, **settings: object) -> Iterator[Leader]:
    """A started leader that asks its engine often."""
    with led(watched_ranks, **settings) as leader:
        leader.engine_watch = EngineWatch(
            leader.target, lambda: bool(leader.released), every_s=EVERY_S
        )
        leader.start()
        yield leader


def has(leader: Leader, reason: str) -> Status:
    """Wait until a replica gives a reason for not being ready; empty if it shall be ready."""
    found = [leader.status()]

    def gives() -> bool:
        found[0] = leader.status()
        return found[0].reason.startswith(reason) if reason else found[0].ready

    eventually(gives)
    return found[0]


@pytest.mark.parametrize("follow", [False, True])
def test_an_idle_engine_that_hangs_is_not_ready(watched_ranks: Followed, follow: bool) -> None:
    answers, call = Event(), watched_ranks.engine.call

    def hang(*given: object) -> object:
        assert answers.wait(60)
        return call(*given)  # type: ignore[arg-type]

    with watched(watched_ranks, follow=follow) as leader:
        assert has(leader, "").ready
        with mock.patch.object(watched_ranks.engine, "call", hang):
            found = has(leader, "the engine has not answered for")
            assert not found.ready
            assert found.fault == found.reason
            answers.set()
            assert has(leader, "").fault == ""


def test_an_engine_that_refuses_connections_is_not_ready(watched_ranks: Followed) -> None:
    with watched(watched_ranks) as leader:
        watched_ranks.engine.faults.dies["status"] = False
        assert not has(leader, "the engine has not answered for").ready
        watched_ranks.engine.faults.dies.clear()
        assert has(leader, "").ready


def test_an_engine_that_another_client_paused_is_not_ready(watched_ranks: Followed) -> None:
    with watched(watched_ranks) as leader:
        watched_ranks.engine.paused = True
        found = has(leader, "paused by another client")
        assert found.paused
        assert not found.ready
        watched_ranks.publish(1)
        assert leader.update() is not None
        assert watched_ranks.engine.paused  # through the swap, as before
        assert has(leader, "paused by another client").version == 1
        watched_ranks.engine.paused = False
        assert not has(leader, "").paused


def test_an_engine_that_another_client_paused_is_asked_often(watched_ranks: Followed) -> None:
    with led(watched_ranks) as leader:
        leader.engine_watch = EngineWatch(leader.target, lambda: False, every_s=3600)
        watched_ranks.engine.paused = True
        leader.start()
        assert has(leader, "paused by another client").paused
        watched_ranks.engine.paused = False
        assert not has(leader, "").paused


def test_resuming_by_our_route_counts_at_once(watched_ranks: Followed) -> None:
    with watched(watched_ranks) as leader:
        watched_ranks.engine.paused = True
        has(leader, "paused by another client")
        leader.resume()
        assert leader.status().ready


def test_the_pause_of_a_swap_is_not_of_another_client(watched_ranks: Followed) -> None:
    holds = PauseHolds(watched_ranks.engine)

    def during_a_swap() -> bool:
        asked.side_effect = lambda: watched_ranks.engine.paused
        holds.hold()
        paused = watched_ranks.engine.paused
        holds.go_on()
        return paused  # read after the swap

    with mock.patch.object(watched_ranks.engine, "is_paused", side_effect=during_a_swap) as asked:
        holds.look()
    assert holds.why == ""


def test_a_leader_that_was_replaced_says_so_without_being_called(watched_ranks: Followed) -> None:
    with watched(watched_ranks) as leader, led(watched_ranks) as other:
        other.start()
        found = has(leader, "rank 0: another leader has attached")
        assert found.fault == found.reason
        assert isinstance(leader.trouble, LeaderReplacedError)
        assert other.status().ready


def test_an_engine_is_watched_too_where_the_caller_follows(watched_ranks: Followed) -> None:
    with led(watched_ranks) as leader:
        leader.engine_watch = EngineWatch(leader.target, lambda: False, every_s=EVERY_S)
        watched_ranks.publish(1)
        following = leader.follow()
        next(following)
        watched_ranks.engine.faults.dies["status"] = False
        assert not has(leader, "the engine has not answered for").ready


def test_a_sleeping_engine_is_not_asked(watched_ranks: Followed) -> None:
    with watched(watched_ranks) as leader:
        leader.released = frozenset({"weights"})
        refuses = mock.Mock(side_effect=ApplyError("the engine has released its weights"))
        with mock.patch.object(leader.target, "look", refuses):
            count = refuses.call_count
            has(leader, "asleep")
            Event().wait(0.4)  # longer than the silence allowed
            assert refuses.call_count <= count + 1  # one may have been on its way
            assert leader.status().fault == ""


def test_an_update_session_of_another_client_is_an_answer(watched_ranks: Followed) -> None:
    with watched(watched_ranks) as leader:
        session = mock.Mock(side_effect=PartialApplyError("an open update session"))
        with mock.patch.object(leader.target, "look", session):
            eventually(lambda: session.call_count > 50)
            assert leader.status().ready
