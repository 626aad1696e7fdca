"""What a replica says of its staleness: lag, times, silence of its store."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

import deltachain
from deltachain.chain.chain import Chain
from deltachain.errors import ChainError, StoreError
from deltachain.replica.leader import Leader
from tests.unit.replica.replicas import Followed, eventually, led

Build = Callable[..., Followed]


def committed_at(here: Followed, version: int) -> float:
    """Time of a version's commit, in seconds since 1970."""
    return Chain.open(here.store).read(version).manifest.time


def test_a_replica_cut_off_from_its_store_is_not_ready_and_says_so(followed: Build) -> None:
    here = followed()
    with led(here, follow=True, max_silence_s=0.2) as leader:
        leader.start()
        here.publish(1)
        eventually(lambda: leader.status().version == 1)
        before = leader.status()
        assert before.ready
        assert before.looked_at is not None
        here.faulty.down = True
        eventually(lambda: not leader.status().ready)
        cut_off = leader.status()
        assert re.fullmatch(
            r"its store has not answered for \d+ s, more than 0.2 s", cut_off.reason
        )
        assert (cut_off.silence_s or 0) > 0.2
        assert (cut_off.version, here.engine.paused) == (1, False)  # it serves what it has
        here.faulty.down = False
        leader.notify()
        eventually(lambda: leader.status().ready)
        again = leader.status().looked_at
        assert again is not None
        assert again > before.looked_at


def test_a_replica_that_never_reached_its_store_is_silent_since_its_start(followed: Build) -> None:
    here = followed()
    here.faulty.down = True
    with led(here, follow=True) as leader:
        leader.start()
        status = leader.status()
        assert (status.looked_at, status.applied_at, status.committed_at) == (None, None, None)
        first = status.silence_s or 0.0
        eventually(lambda: (leader.status().silence_s or 0.0) > first)


def test_who_does_not_follow_by_itself_need_not_hear_of_its_store(followed: Build) -> None:
    here = followed()
    with led(here, max_silence_s=1e-9) as leader:
        leader.start()
        assert leader.status().ready
        assert "silence_seconds" not in names(leader)  # or an alert would fire for ever
    with led(here, follow=True) as leader:
        leader.start()
        assert "silence_seconds" in names(leader)


def names(leader: Leader) -> set[str]:
    """Names of the figures of a replica."""
    return {figure.name for figure in leader.figures()}


def test_a_rollback_is_not_made_unready_by_silence(followed: Build) -> None:
    here = followed()
    with led(here, follow=True, max_silence_s=0.1) as leader:
        leader.start()
        here.publish(1)
        eventually(lambda: leader.status().version == 1)
        here.faulty.down = True
        leader.rollback()
        eventually(lambda: (leader.status().silence_s or 0.0) > 0.1)
        assert leader.status().ready


def test_a_long_fetch_is_no_silence(followed: Build) -> None:
    here = followed()
    with led(here, follow=True, max_silence_s=1e-9) as leader:
        leader.update()
        with leader.subscriber.times.staging():
            assert (leader.status().silence_s, leader.status().ready) == (0.0, True)
        eventually(lambda: not leader.status().ready)


def test_the_lag_counts_from_what_a_publisher_announced(followed: Build) -> None:
    """A replica that is cut off does not see new versions, but it is told of them."""
    here = followed()
    with led(here, max_lag=1) as leader:
        leader.start()
        here.publish(1, 2)
        here.faulty.down = True
        with pytest.raises(StoreError):
            leader.update(2, manifest="0" * 64)
        status = leader.status()
        assert (status.version, status.head, status.lag_versions) == (0, 2, 2)
        assert status.reason == "2 versions behind"
        here.faulty.down = False
        leader.update()
        assert (leader.status().lag_versions, leader.status().ready) == (0, True)


def test_an_operators_wish_is_no_version_that_anybody_saw(followed: Build) -> None:
    here = followed()
    with led(here) as leader:
        leader.start()
        with pytest.raises(ChainError):
            leader.update(10**9)
        assert leader.status().head == 0


def test_status_tells_times_and_software(followed: Build) -> None:
    here = followed()
    with led(here) as leader:
        leader.start()
        first = leader.status()
        assert (first.committed_at, first.applied_at) == (committed_at(here, 0), None)
        here.publish(1)
        leader.update()
        here.publish(2)
        leader.update()
        status = leader.status()
        assert (status.deltachain, status.engine) == (deltachain.__version__, "fake/1.0")
        assert status.committed_at == committed_at(here, 2)
        assert (status.applied_at or 0.0) >= committed_at(here, 2)
        assert 0.0 <= (status.age_s or -1.0) <= time.time() - committed_at(here, 2)
        leader.rollback()
        assert leader.status().committed_at == committed_at(here, 1)
