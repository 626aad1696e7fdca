"""Two leaders of one engine, and two callers of one leader: one leads, one thing at a time."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event
from typing import Any

import pytest

from deltachain.errors import (
    ApplyError,
    ChainError,
    ConfigError,
    DeltaChainError,
    LeaderReplacedError,
    PartialApplyError,
)
from deltachain.replica import spool
from deltachain.replica.leader import Leader
from deltachain.replica.messages import RankReply, RankRequest, StageRequest, SwapRequest
from deltachain.replica.settings import RankSettings, ReplicaSettings
from deltachain.replica.target import PreparedSwap, ReplicaTarget
from deltachain.subscribe import Subscriber, subscriber
from tests.support.engine import HOSTED, Sharding
from tests.support.values import present
from tests.unit.replica.replicas import Followed

Build = Callable[..., Followed]


@pytest.fixture
def here(followed: Build) -> Followed:
    """Two ranks that hold version 1 of 2, led by the subscriber."""
    here = followed(Sharding(tp=2))
    here.publish(1)
    here.subscriber.update()
    here.publish(2)
    return here


@pytest.fixture
def later(here: Followed) -> Subscriber:
    """Leads the same ranks from now on."""
    later = here.subscribe()
    later.open()
    return later


@pytest.fixture
def leader(here: Followed) -> Leader:
    settings = ReplicaSettings(subscribe=here.subscriber.config, spool=here.spool)
    leader = Leader(settings, here.engine, store=here.faulty)
    leader.subscriber.open()
    return leader


def test_a_leader_that_was_replaced_touches_neither_weights_nor_scheduler(
    here: Followed,
) -> None:
    staged = present(here.subscriber.stage())
    later = here.subscribe()
    later.open()
    here.engine.pause()  # the other is in the middle of a swap
    here.engine.events.clear()
    with pytest.raises(PartialApplyError, match="another leader has attached this rank since"):
        here.subscriber.swap(staged)
    assert here.engine.events == []
    assert here.engine.paused
    assert not here.subscriber.poisoned
    assert here.holds(1)
    here.engine.resume()
    later.update()
    assert here.holds(2)


def test_a_leader_that_was_replaced_stages_nothing(here: Followed, later: Subscriber) -> None:
    here.engine.events.clear()
    with pytest.raises(PartialApplyError, match="another leader"):
        here.subscriber.update()
    assert here.engine.events == []
    assert all(not rank.rank.staged for rank in here.engine.services)
    later.update()
    assert here.holds(2)


def test_what_another_leader_wrote_poisons_nobody(here: Followed, later: Subscriber) -> None:
    later.update()
    with pytest.raises(PartialApplyError, match="another leader"):
        here.subscriber.scrub()
    assert not here.subscriber.poisoned
    assert later.scrub()


def test_a_leader_that_was_replaced_is_not_ready_and_resumes_nobody(
    here: Followed, leader: Leader
) -> None:
    leader.update()
    assert leader.status().ready
    later = here.subscribe()
    later.open()
    here.engine.pause()  # the other is in the middle of a swap
    here.engine.events.clear()
    for action in (leader.resume, leader.pause, leader.scrub):
        with pytest.raises(LeaderReplacedError, match="another leader"):
            action()
    assert here.engine.events == []
    here.engine.resume()
    here.publish(3)
    with pytest.raises(LeaderReplacedError):
        leader.update()
    status = leader.status()
    assert (status.ready, status.poisoned) == (False, False)
    assert "another leader" in status.reason
    later.update()
    assert here.holds(3)


def test_a_name_is_that_of_what_is_held_though_another_swaps(
    here: Followed, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks at the version, and then names it, may be overtaken by a swap in between."""
    leader.update()
    named, go_on = Event(), Event()
    name = here.engine.name_version

    def slow(version: int) -> None:
        if version == 1:
            named.set()
            assert go_on.wait(20)
        name(version)

    monkeypatch.setattr(here.engine, "name_version", slow)
    with ThreadPoolExecutor(2) as pool:
        back = pool.submit(leader.rollback, 1)
        assert named.wait(20)
        refused = pool.submit(leader.update, 2)
        assert not wait([refused], timeout=0.2).done
        go_on.set()
        assert back.result().version == 1
        with pytest.raises(ChainError):
            refused.result()
    names = [event for event in here.engine.events if event.startswith("name")]
    assert names[-1] == "name 1"
    assert here.holds(1)


def test_a_spool_without_room_for_a_while_does_not_end_following(
    here: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Event()
    put = spool._put

    def full(*args: Any) -> None:
        if not room.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        put(*args)

    monkeypatch.setattr(spool, "_put", full)
    told: list[DeltaChainError] = []

    def looked(exc: DeltaChainError | None) -> None:
        if exc is not None:
            told.append(exc)
            room.set()

    assert next(here.subscriber.follow(looked=looked)).version == 2
    assert "No space left" in str(told[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_can_not_load_again_is_not_believed(followed: Build, rank: int) -> None:
    """A scrub lets the engine load its host copies again; one that fails may be half loaded."""
    odd = tuple(name for name in HOSTED if name != "bias")  # zeros on one rank of two
    here = followed(Sharding(tp=2, odd=odd))
    here.publish(1)
    here.subscriber.update()

    def fail(_: str) -> None:
        raise OSError("device lost")

    here.engine.models[rank].failing = fail
    assert not here.subscriber.scrub()
    assert here.subscriber.poisoned
    here.engine.models[rank].failing = lambda _: None
    here.subscriber.update()
    assert here.holds(1)
    assert here.subscriber.scrub()


def test_nobody_resumes_in_the_middle_of_a_swap(
    here: Followed, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = Event(), Event()
    call = here.engine.call

    def slow(request: RankRequest) -> Sequence[RankReply]:
        if isinstance(request, SwapRequest):
            writing.set()
            assert go_on.wait(20)
        return call(request)

    monkeypatch.setattr(here.engine, "call", slow)
    here.engine.events.clear()
    with ThreadPoolExecutor(4) as pool:
        update = pool.submit(leader.update)
        assert writing.wait(20)
        others = [pool.submit(action) for action in (leader.resume, leader.pause, leader.scrub)]
        assert not wait(others, timeout=0.2).done
        assert here.engine.events == ["pause"]
        go_on.set()
        assert update.result() is not None
        assert others[2].result() is True
    assert here.engine.events[:4] == ["pause", "write", "name 2", "resume"]
    assert here.holds(2)


def test_two_stages_at_once_forget_nothing_of_each_other(
    here: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollback from the store stages beside an update; each tells the ranks what to keep."""
    first_asks, second_is_done = Event(), Event()
    call = here.engine.call

    def slow(request: RankRequest) -> Sequence[RankReply]:
        if isinstance(request, StageRequest) and not first_asks.is_set():
            first_asks.set()
            second_is_done.wait(0.5)
        return call(request)

    monkeypatch.setattr(here.engine, "call", slow)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(here.subscriber.stage)
        assert first_asks.wait(20)
        two = pool.submit(here.subscriber.stage)
        two.add_done_callback(lambda _: second_is_done.set())
        staged = [one.result(), two.result()]
    kept = [set(rank.rank.staged) for rank in here.engine.services]
    tickets = {
        one.prepared.ticket for one in staged if one and isinstance(one.prepared, PreparedSwap)
    }
    assert len(tickets) == 2
    assert all(tickets <= one for one in kept)


def test_two_that_open_at_once_agree_on_what_is_held(
    here: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push and a poll, as soon as there is a chain: the late one must not undo the first."""
    late = here.subscribe()
    identify, looks, go_on = vars(subscriber)["identify"], Event(), Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        found = identify(*args, **kwargs)
        if not looks.is_set():
            looks.set()
            go_on.wait(0.5)
        return found

    monkeypatch.setattr(subscriber, "identify", slow)
    with ThreadPoolExecutor(2) as pool:
        poll = pool.submit(late.open)
        assert looks.wait(20)
        push = pool.submit(late.update)
        push.add_done_callback(lambda _: go_on.set())
        poll.result()
        push.result()
    assert (late.version, late.poisoned) == (2, False)
    assert late.scrub()


def test_a_leader_of_another_chain_replaces_nobody(here: Followed) -> None:
    for rank in here.engine.services:
        rank._settings = RankSettings(spool=here.spool, url=here.store.url)
    stranger = ReplicaTarget(here.engine, "s3://elsewhere/run", here.spool)
    with pytest.raises(ConfigError, match="was started to follow"):
        Subscriber(here.subscriber.config, stranger, store=here.store).open()
    here.subscriber.update()
    assert here.holds(2)


def test_an_engine_that_somebody_else_paused_to_write_is_not_resumed(here: Followed) -> None:
    staged = present(here.subscriber.stage())
    here.engine.faults.refuses[0, "status"] = PartialApplyError("an update session is open")
    here.engine.pause()
    here.engine.events.clear()
    with pytest.raises(PartialApplyError, match="session is open"):
        here.subscriber.swap(staged)
    assert here.engine.events == []
    assert here.engine.paused


def test_a_replica_in_doubt_that_does_not_pause_is_healed_all_the_same(
    here: Followed, leader: Leader
) -> None:
    leader.update()
    here.scribble(0, "layers.0.norm.weight")
    assert not leader.subscriber.scrub()
    here.engine.faults.pause = ApplyError("no answer")
    leader._looked(ApplyError("it is in doubt"))
    here.engine.faults.pause = None
    leader.update()
    assert here.holds(2)
    assert leader.status().ready
    assert not here.engine.paused


def test_a_pause_that_failed_does_not_stick(here: Followed, leader: Leader) -> None:
    here.engine.faults.pause = ApplyError("no answer")
    with pytest.raises(ApplyError):
        leader.pause()
    here.engine.faults.pause = None
    leader.update()
    assert leader.status().ready
    assert not here.engine.paused


def test_a_rollback_from_the_store_is_not_starved(
    followed: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions that arrive meanwhile would overtake it, one after another."""
    here = followed(Sharding(tp=2), undo_applies=0)
    here.publish(1, 2)
    here.subscriber.update()
    stage, attempts = here.target.stage, [0]
    with ThreadPoolExecutor(1) as pool:

        def slow(*args: Any, **kwargs: Any) -> Any:
            attempts[0] += 1
            here.publish(2 + attempts[0])
            wait([pool.submit(here.subscriber.update)], timeout=0.5)
            return stage(*args, **kwargs)

        monkeypatch.setattr(here.target, "stage", slow)
        assert here.subscriber.rollback(0).version == 0
    assert attempts[0] == 1
    assert here.holds(0)
