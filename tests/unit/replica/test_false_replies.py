"""Replies that are of another type, or cut short, though they come from the right rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deltachain.errors import ApplyError, PartialApplyError, PoisonedError
from deltachain.replica.messages import PendingReply, RankReply, StartedReply, SwapReply
from tests.unit.replica.replicas import Followed

Build = Callable[..., Followed]


@pytest.fixture
def here(followed: Build) -> Followed:
    """Two ranks that hold version 1 of 2."""
    here = followed()
    here.publish(1)
    here.subscriber.update()
    here.publish(2)
    here.engine.events.clear()
    return here


def heals(here: Followed) -> bool:
    """Whether the next update leads out of it, from nothing."""
    receipt = here.subscriber.update()
    return receipt is not None and receipt.previous is None and here.holds(2)


@pytest.mark.parametrize(
    ("call", "reply"),
    [
        ("stage", PendingReply()),
        ("poll", StartedReply()),
        ("poll", SwapReply(seconds=0, version=2, pid=1)),
        ("status", StartedReply()),
    ],
)
def test_replies_of_another_type_are_not_believed(
    here: Followed, call: str, reply: RankReply
) -> None:
    """They echo the request, so that nothing else tells them from the right one."""
    here.engine.faults.mistyped[call] = reply
    with pytest.raises((PoisonedError, PartialApplyError), match=f"ranks' answers to '{call}'"):
        here.subscriber.update()
    assert here.holds(1)
    assert "write" not in here.engine.events


def test_a_rank_that_says_that_it_staged_when_asked_to_swap_poisons(here: Followed) -> None:
    here.engine.faults.mistyped["swap"] = StartedReply()
    with pytest.raises(PoisonedError, match="ranks' answers to 'swap'"):
        here.subscriber.update()
    assert here.engine.paused
    assert here.subscriber.version is None
    here.engine.faults.mistyped.clear()
    assert heals(here)


@pytest.mark.parametrize("call", ["stage", "poll"])
def test_truncated_replies_are_a_typed_error(here: Followed, call: str) -> None:
    here.engine.faults.truncated.add(call)
    with pytest.raises(ApplyError, match="cannot read a rank's reply") as caught:
        here.subscriber.update()
    assert "same version of deltachain" in caught.value.hint
    assert here.holds(1)
    assert here.engine.events == []
    here.engine.faults.truncated.clear()
    here.subscriber.update()
    assert here.holds(2)


def test_a_truncated_reply_to_a_swap_poisons(here: Followed) -> None:
    here.engine.faults.truncated.add("swap")
    with pytest.raises(ApplyError, match="cannot read a rank's reply"):
        here.subscriber.update()
    assert here.engine.paused
    assert here.subscriber.version is None
    here.engine.faults.truncated.clear()
    assert heals(here)
