"""The leader of a replica: ready or not, in trouble, poisoned and healed, paused by hand."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest

from deltachain.errors import (
    ChainError,
    ForkedChainError,
    LeaderReplacedError,
    PoisonedError,
)
from tests.unit.replica.replicas import Followed, eventually, led

Build = Callable[..., Followed]

NORM = "layers.0.norm.weight"


def test_it_catches_up_before_it_is_ready(followed: Build) -> None:
    here = followed()
    here.publish(1, 2)
    with led(here) as leader:
        assert not leader.status().ready
        leader.start()
        status = leader.status()
        assert (status.ready, status.reason, status.version, status.head) == (True, "", 2, 2)
        assert here.holds(2)
        assert here.engine.events[-1] == "resume"
        assert "name 2" in here.engine.events
        assert sum(row["tensors"] for row in status.classes.values()) > 3


def test_what_is_held_behind_the_head_is_named_too(followed: Build) -> None:
    here = followed()
    here.publish(1)
    for info in list(here.store.list("deltas/")):
        here.store.delete(info.key)
    with led(here) as leader:
        leader.start()
        assert (leader.status().version, leader.status().ready) == (0, False)
        assert leader.status().trouble
        assert here.engine.events == ["name 0"]


def test_it_follows_and_says_what_goes_wrong(followed: Build) -> None:
    here = followed()
    with led(here, follow=True) as leader:
        leader.start()
        here.publish(1)
        eventually(lambda: leader.status().version == 1)
        here.faulty.down = True
        eventually(lambda: leader.status().trouble)
        assert leader.status().ready  # it serves what it has
        here.faulty.down = False
        here.publish(2)
        leader.notify()
        eventually(lambda: leader.status().version == 2 and not leader.status().trouble)
        assert here.holds(2)


def test_a_replica_behind_what_it_may_be_is_not_ready(followed: Build) -> None:
    here = followed()
    with led(here, max_lag=1) as leader:
        leader.start()
        here.publish(1, 2, 3)
        leader.update(1)
        assert leader.status().lag_versions == 2
        assert leader.status().reason == "2 versions behind"
        leader.update()
        assert leader.status().ready


def test_a_replica_that_never_was_at_the_head_is_not_ready(followed: Build) -> None:
    here = followed()
    here.publish(1, 2, 3)
    with led(here) as leader:
        leader.update(1)
        status = leader.status()
        assert (status.ready, status.reason) == (False, "it has not caught up yet")
        leader.update()
        assert leader.status().ready


def test_a_scrub_that_finds_something_heals(followed: Build) -> None:
    here = followed()
    here.publish(1, 2)
    with led(here) as leader:
        leader.update()
        assert leader.scrub()
        here.scribble(0, NORM)
        assert not leader.scrub()
        assert here.holds(2)
        assert leader.status().ready
        assert not here.engine.paused


@pytest.mark.parametrize("ordered", [1, 3])
def test_a_replica_that_does_not_follow_heals_where_it_was_ordered_to_be(
    followed: Build, ordered: int
) -> None:
    """By a scrub, as after a wake-up or a reload of the engine's own; then all orders go on."""
    here = followed()
    here.publish(1, 2, 3, 4)
    with led(here) as leader:
        leader.update(ordered)
        here.scribble(0, NORM)
        assert not leader.scrub()
        assert leader.subscriber.version == ordered
        assert here.holds(ordered)
        assert not here.engine.paused
        leader.update(4)
        assert here.holds(4)


def test_a_replica_that_follows_heals_at_the_head(followed: Build) -> None:
    here = followed()
    here.publish(1)
    with led(here, follow=True) as leader:
        leader.update()
        here.publish(2)
        here.scribble(0, NORM)
        assert not leader.scrub()
        assert here.holds(2)


@pytest.mark.parametrize("to", [1, 3])
def test_a_poisoned_replica_is_rolled_back(followed: Build, to: int) -> None:
    """Nobody knows its bits, but which version it was to hold; the way back is from nothing."""
    here = followed()
    here.publish(1, 2, 3)
    with led(here) as leader:
        leader.update(3)
        here.scribble(0, NORM)
        assert not leader.subscriber.scrub()
        with pytest.raises(ChainError, match="cannot roll back from version None to 4"):
            leader.rollback(4)
        assert leader.rollback(to).version == to
        assert here.holds(to)
        assert (leader.status().pinned, leader.status().poisoned) == (True, False)


def test_a_replica_in_doubt_does_not_resume(followed: Build) -> None:
    here = followed()
    here.publish(1)
    with led(here) as leader:
        leader.update(1)
        here.scribble(0, NORM)
        here.faulty.down = True
        with pytest.raises(Exception, match="is down"):
            leader.scrub()
        status = leader.status()
        assert (status.poisoned, status.ready, status.version) == (True, False, None)
        assert here.engine.paused
        assert here.engine.events[-1] == "pause in doubt"
        with pytest.raises(PoisonedError, match="stays paused"):
            leader.resume()
        assert here.engine.paused
        here.faulty.down = False
        leader.update()
        assert here.holds(1)
        assert not here.engine.paused


def test_who_paused_it_resumes_it(followed: Build) -> None:
    here = followed()
    here.publish(1)
    with led(here) as leader:
        leader.update(0)
        leader.pause()
        leader.update(1)
        assert here.engine.events[-1] != "resume"
        assert leader.status().reason == "paused"
        leader.resume()
        assert here.engine.events[-1] == "resume"
        assert leader.status().ready


def test_a_replica_whose_engine_has_released_memory_is_not_ready(followed: Build) -> None:
    here = followed()
    with led(here) as leader:
        leader.update()
        leader.released = frozenset({"weights", "kv_cache"})
        status = leader.status()
        told = "asleep: the engine has released its kv_cache, weights"
        assert (status.ready, status.reason) == (False, told)
        leader.released = frozenset()
        assert leader.status().ready


def test_a_rollback_stays_until_it_is_released(followed: Build) -> None:
    here = followed()
    here.publish(1, 2)
    with led(here) as leader:
        leader.start()
        assert leader.rollback(1).version == 1
        assert leader.update() is None
        assert (leader.status().version, leader.status().pinned) == (1, True)
        assert leader.status().ready
        with pytest.raises(ChainError, match="cannot roll back"):
            leader.rollback(2)
        leader.release()
        leader.update()
        assert here.holds(2)


def test_a_release_follows_again_where_following_has_ended(
    followed: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does where the store went back and was written to: the hint says to roll back."""
    here = followed()
    here.publish(1, 2)
    with led(here, follow=True) as leader:
        leader.start()
        eventually(lambda: leader.status().ready)
        with monkeypatch.context() as patch:
            fork = ForkedChainError("two chains")
            patch.setattr(leader.subscriber, "update", Mock(side_effect=fork))
            patch.setattr(leader.subscriber, "stage", Mock(side_effect=fork))
            here.publish(3)
            eventually(lambda: not leader.status().following)
        assert "two chains" in leader.status().reason
        leader.rollback(1)
        leader.release()
        eventually(lambda: leader.status().version == 3)
        assert (leader.status().ready, leader.status().following) == (True, True)


class Panic(BaseException):
    """As extensions in Rust raise it."""


def test_a_loop_that_ends_in_whatever_way_is_told(
    followed: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = followed()
    here.publish(1)
    with led(here, follow=True) as leader:
        leader.start()
        eventually(lambda: leader.status().ready)
        monkeypatch.setattr(leader.subscriber, "stage", Mock(side_effect=Panic("no")))
        monkeypatch.setattr(leader.subscriber, "update", Mock(side_effect=Panic("no")))
        here.publish(2)
        eventually(lambda: not leader.status().following)
        status = leader.status()
        assert (status.ready, status.reason) == (False, "following ended: no")


def test_a_replaced_leader_confirms_no_version(followed: Build) -> None:
    here = followed()
    here.publish(1, 2)
    with led(here) as leader:
        leader.start()
        held = leader.subscriber.held
        assert held is not None
        assert leader.update(2, manifest=held.manifest) is None
        other = here.subscribe()
        other.rollback(1)
        assert here.holds(1)
        with pytest.raises(LeaderReplacedError):
            leader.update(2, manifest=held.manifest)
        assert not leader.status().ready


def test_what_others_paused_stays_paused(followed: Build) -> None:
    here = followed()
    here.publish(1, 2, 3)
    with led(here) as leader:
        leader.update(0)
        here.engine.pause()
        leader.update(1)
        leader.update(2)
        assert here.engine.paused
        here.engine.resume()
        leader.update(3)
        assert not here.engine.paused, "nobody paused it this time"


def test_a_pause_of_others_outlives_doubt(followed: Build) -> None:
    here = followed()
    here.publish(1)
    with led(here) as leader:
        leader.update(1)
        here.engine.pause()
        here.scribble(0, NORM)
        assert not leader.scrub()
        assert here.holds(1)
        assert here.engine.paused
