"""Replicas compared with each other: who is behind, cut off, in doubt."""

from __future__ import annotations

from typing import Any

import pytest

from deltachain.control.comparison import (
    ReplicaRow,
    compare,
    newest_seen,
)
from deltachain.errors import ControlPlaneError
from deltachain.status import Health, HealthLimits, Status
from tests.unit.control.statuses import status

OTHERS = {"http://x": status(), "http://y": status(), "http://z": status()}


def judged(one: Status | ControlPlaneError, **limits: Any) -> ReplicaRow:
    """The row of a replica beside three that are well."""
    rows = compare({"http://a": one, **OTHERS}, HealthLimits(**limits))
    others = [row for row in rows if row.engine != "http://a"]
    assert {row.health for row in others} == {"ready"}
    return next(row for row in rows if row.engine == "http://a")


@pytest.mark.parametrize(
    ("found", "health", "why"),
    [
        (status(), "ready", ""),
        (status(6), "behind", "it has seen version 6 as the newest, others 7"),
        (status(6, head=7), "behind", ""),
        (status(5, pinned=True), "pinned", ""),
        (status(ready=False, reason="paused"), "not ready", "paused"),
        (status(None, ready=False, reason="it holds no version"), "not ready", "holds no version"),
        (status(ready=False, fault="the engine is dead"), "failed", "the engine is dead"),
        (status(7, silence_s=61.0), "cut off", "its store has not answered for 61 s"),
        (status(3, head=3, silence_s=3600.0), "cut off", "its store has not answered for 3600 s"),
        (status(7, silence_s=61.0, following=False), "ready", ""),
        (status(7, silence_s=61.0, pinned=True), "pinned", ""),
        (status(7, silence_s=None), "ready", ""),
        (status(poisoned=True, ready=False, reason="poisoned"), "poisoned", "poisoned"),
        (status(doubt="the store went back"), "in doubt", "the store went back"),
        (status(head=10**6), "in doubt", "it says that version 1000000 exists, which no other"),
        (status(manifest="f" * 64), "in doubt", "others hold another version 7"),
        (status(chain="d" * 32), "in doubt", "others follow another chain than dddddddddddd"),
        (ControlPlaneError("http://a did not answer in 5 s"), "failed", "did not answer in 5 s"),
    ],
)
def test_the_health_of_one_among_others(
    found: Status | ControlPlaneError, health: Health, why: str
) -> None:
    row = judged(found)
    assert row.health == health
    assert bool(row.why) == bool(why)
    assert why in " ".join(row.why)


def test_the_lag_is_behind_the_newest_that_anybody_saw() -> None:
    """A replica that is cut off says lag 0: it sees no newer version."""
    row = judged(status(3, head=3, lag_versions=0))
    assert (row.lag, row.health) == (4, "behind")


@pytest.mark.parametrize(("lag", "health"), [(None, "behind"), (4, "behind"), (3, "stale")])
def test_a_limit_makes_who_is_behind_stale(lag: int | None, health: Health) -> None:
    row = judged(status(3, head=7), lag=lag)
    assert (row.health, row.is_alarming) == (health, health == "stale")


def test_one_that_says_too_much_makes_no_other_stale() -> None:
    rows = compare({"http://a": status(head=10**6), **OTHERS}, HealthLimits(lag=0))
    assert [(row.health, row.lag) for row in rows] == [("in doubt", 0), *[("ready", 0)] * 3]


def test_one_that_holds_a_new_version_is_believed() -> None:
    rows = compare({"http://a": status(8), **OTHERS}, HealthLimits())
    assert [(row.health, row.lag) for row in rows] == [*[("behind", 1)] * 3, ("ready", 0)]


def test_two_that_follow_two_chains_are_both_in_doubt() -> None:
    there = {"http://a": status(chain="c" * 32), "http://b": status(chain="d" * 32)}
    rows = compare(there, HealthLimits())
    assert [row.health for row in rows] == ["in doubt", "in doubt"]


def test_of_two_each_is_believed() -> None:
    rows = compare({"http://a": status(7, head=9), "http://b": status(7)}, HealthLimits())
    assert [row.lag for row in rows] == [2, 2]


def test_the_worst_come_first_then_the_largest_lag() -> None:
    rows = compare(
        {
            **OTHERS,
            "http://b": status(5),
            "http://c": status(3),
            "http://d": ControlPlaneError("gone"),
            "http://e": status(7, silence_s=99.0),
        },
        HealthLimits(),
    )
    assert [row.engine[-1] for row in rows] == ["d", "e", "c", "b", "x", "y", "z"]


def test_chains_are_told_apart() -> None:
    """Versions of two chains have nothing to do with each other."""
    other = status(900, chain="d" * 32)
    rows = compare({"http://a": other, "http://b": other, **OTHERS}, HealthLimits())
    assert {row.lag for row in rows} == {0}


def test_nobody_saw_anything() -> None:
    assert newest_seen([]) is None
    assert newest_seen([status(None)]) is None
    assert compare({}, HealthLimits()) == []
