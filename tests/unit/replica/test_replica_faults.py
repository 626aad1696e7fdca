"""One rank's refusal is every rank's refusal, and one rank's failure leaves no rank changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from deltachain.errors import (
    ApplyError,
    BaseMismatchError,
    DeltaChainError,
    PartialApplyError,
    PoisonedError,
    TensorMismatchError,
)
from deltachain.replica import target as client
from deltachain.replica.messages import (
    PendingReply,
    PollRequest,
    RankReply,
    StagedReply,
)
from deltachain.types import StateDigest
from tests.support.engine import Sharding
from tests.unit.replica.replicas import Followed

Build = Callable[..., Followed]

LOST = OSError("device lost")
ONE = StateDigest(0, 1)


@pytest.fixture
def here(followed: Build) -> Followed:
    """Two ranks that hold version 1 of 2."""
    here = followed()
    here.publish(1)
    here.subscriber.update()
    here.publish(2)
    here.engine.events.clear()
    return here


def heals(here: Followed, version: int = 2) -> bool:
    """Whether the next update leads out of it, from nothing."""
    here.engine.events.clear()
    receipt = here.subscriber.update()
    assert receipt is not None
    assert receipt.previous is None
    assert here.engine.events == ["pause", "write", f"name {version}", "resume"]
    return here.holds(version) and here.subscriber.scrub()


# Before anything is written


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("verb", ["stage", "poll"])
@pytest.mark.parametrize("error", [ApplyError("no memory"), TensorMismatchError("no way")])
def test_one_refusal_is_everybodys(
    here: Followed, rank: int, verb: str, error: DeltaChainError
) -> None:
    here.engine.faults.refuses[rank, verb] = error
    before = here.engine.bits()
    with pytest.raises(type(error), match=f"rank {rank}: {error.args[0]}"):
        here.subscriber.update()
    assert here.engine.bits() == before
    assert here.engine.events == [], "it was not even paused"
    assert here.subscriber.version == 1
    here.engine.faults.refuses.clear()
    here.subscriber.update()
    assert here.holds(2)


def lies_when_polled(
    here: Followed, monkeypatch: pytest.MonkeyPatch, lie: Callable[[StagedReply], StagedReply]
) -> None:
    """Rank 1 says that it staged something else."""
    handlers: dict[Any, Any] = here.engine.services[1]._handlers
    poll = handlers[PollRequest]

    def answer(request: PollRequest) -> RankReply:
        reply = poll(request)
        return lie(reply) if isinstance(reply, StagedReply) else reply

    monkeypatch.setitem(handlers, PollRequest, answer)


def test_a_rank_that_stages_something_else_is_found_out(
    here: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof is of what the ranks say that they will write, added up."""

    def lie(reply: StagedReply) -> StagedReply:
        effects = tuple(
            (who, effect if who != "1" else replace(effect, change=effect.change + ONE))
            for who, effect in reply.effects  # of "0,1" rank 0 says the truth
        )
        return msgspec.structs.replace(reply, effects=effects)

    lies_when_polled(here, monkeypatch, lie)
    before = here.engine.bits()
    with pytest.raises(BaseMismatchError):
        here.subscriber.update()
    assert here.engine.bits() == before
    assert here.engine.events == []


def test_a_rank_that_leaves_elements_out_is_found_out(
    here: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies_when_polled(here, monkeypatch, lambda reply: msgspec.structs.replace(reply, effects=()))
    with pytest.raises(BaseMismatchError, match=r"the ranks would write [\d,]+ of [\d,]+ elements"):
        here.subscriber.update()
    assert here.engine.events == []


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("verb", ["stage", "poll"])
def test_an_engine_that_dies_while_staging_has_written_nothing(
    here: Followed, verb: str, first: bool
) -> None:
    here.engine.faults.dies[verb] = first
    with pytest.raises(ApplyError, match=f"did not answer '{verb}'"):
        here.subscriber.update()
    assert here.holds(1)
    assert here.engine.events == []
    here.engine.faults.dies.clear()
    here.subscriber.update()
    assert here.holds(2)


@pytest.mark.parametrize("fault", ["shifted", "fewer", "stale"])
@pytest.mark.parametrize("verb", ["stage", "poll"])
def test_answers_of_others_are_not_believed(here: Followed, verb: str, fault: str) -> None:
    getattr(here.engine.faults, fault).add(verb)
    with pytest.raises(PoisonedError, match=f"mixed up its ranks' answers to '{verb}'"):
        here.subscriber.update()
    assert here.holds(1)
    assert here.engine.events == []


def test_a_rank_that_never_ends_staging_is_given_up(
    here: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "STAGE_S", 0.05)
    handlers: dict[Any, Any] = here.engine.services[1]._handlers
    monkeypatch.setitem(handlers, PollRequest, lambda _: PendingReply())
    with pytest.raises(ApplyError, match="some rank did not stage within"):
        here.subscriber.update()
    assert here.engine.events == []


def test_an_engine_that_does_not_pause_is_not_written_to(here: Followed) -> None:
    here.engine.faults.pause = ApplyError("busy")
    with pytest.raises(PartialApplyError, match="did not pause"):
        here.subscriber.update()
    assert here.engine.events == ["pause", "resume"]
    assert here.holds(1)
    assert here.subscriber.version == 1
    here.engine.faults.pause = None
    here.subscriber.update()
    assert here.holds(2)


# In the middle of writing


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("nth", [1, 4, 20])
def test_a_failure_on_one_rank_is_taken_back_on_all(here: Followed, rank: int, nth: int) -> None:
    here.engine.faults.writes[rank, "write", nth] = LOST
    before = here.engine.bits()
    with pytest.raises(PartialApplyError, match=f"rank {rank}: .*every rank has its old bits"):
        here.subscriber.update()
    assert not here.engine.faults.writes, "it was to fail"
    assert here.engine.bits() == before
    assert here.engine.events == ["pause", "write", "take back", "resume"]
    assert here.subscriber.version == 1
    assert here.subscriber.scrub()
    here.subscriber.update()
    assert here.holds(2)


def test_a_failure_on_every_rank_is_taken_back_by_each(here: Followed) -> None:
    for rank in (0, 1):
        here.engine.faults.writes[rank, "write", 3] = LOST
    before = here.engine.bits()
    with pytest.raises(PartialApplyError):
        here.subscriber.update()
    assert here.engine.bits() == before
    assert here.engine.events == ["pause", "write", "resume"]
    here.subscriber.update()
    assert here.holds(2)


def test_who_failed_is_not_asked_to_write_again(here: Followed) -> None:
    """Taking back what it has not written would put the new bits there, if that failed as well."""
    here.engine.faults.writes[1, "write", 4] = LOST
    here.engine.faults.writes[1, "take back", 3] = LOST
    before = here.engine.bits()
    with pytest.raises(PartialApplyError):
        here.subscriber.update()
    assert (1, "take back", 3) in here.engine.faults.writes
    assert here.engine.bits() == before


def test_a_rank_that_refuses_to_write_keeps_the_others_from_it(here: Followed) -> None:
    here.engine.faults.refuses[1, "swap"] = PartialApplyError("nothing is staged")
    before = here.engine.bits()
    with pytest.raises(PartialApplyError):
        here.subscriber.update()
    assert here.engine.bits() == before
    assert here.subscriber.version == 1


def test_a_rank_that_forgot_its_ticket_keeps_the_others_from_writing(here: Followed) -> None:
    staged = here.subscriber.stage()
    assert staged is not None
    here.engine.services[0].rank.keep([])
    before = here.engine.bits()
    with pytest.raises(PartialApplyError, match="rank 0: nothing is staged under ticket"):
        here.subscriber.swap(staged)
    assert here.engine.bits() == before
    assert here.engine.events[-1] == "resume"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_rollback_leaves_the_newer_version(here: Followed, rank: int) -> None:
    here.subscriber.update()
    here.engine.faults.writes[rank, "take back", 5] = LOST
    with pytest.raises(PartialApplyError):
        here.subscriber.rollback()
    assert here.holds(2)
    assert (here.subscriber.version, here.subscriber.pinned) == (2, False)
    assert here.subscriber.rollback().version == 1
    assert here.holds(1)
    assert here.subscriber.scrub()


# What cannot be taken back


def test_a_rank_that_can_not_take_back_poisons(here: Followed) -> None:
    here.engine.faults.writes.update({(0, "write", 4): LOST, (0, "write", 6): LOST})
    with pytest.raises(PoisonedError, match="so did taking it back"):
        here.subscriber.update()
    assert here.engine.events == ["pause", "write"], "it stays paused"
    assert here.engine.paused
    assert here.subscriber.version is None
    assert heals(here)


def test_a_rank_that_can_not_take_back_what_another_failed_at_poisons(here: Followed) -> None:
    here.engine.faults.writes.update({(1, "write", 4): LOST, (0, "take back", 2): LOST})
    with pytest.raises(PoisonedError, match="could not be taken back on every other rank"):
        here.subscriber.update()
    assert here.engine.paused
    assert here.subscriber.version is None
    assert heals(here)


@pytest.mark.parametrize("rank", [0, 1])
def test_without_the_old_bits_a_failure_poisons(followed: Build, rank: int) -> None:
    here = followed(stage_budget=0)
    here.publish(1, 2)
    here.engine.faults.writes[rank, "write", 4] = LOST
    with pytest.raises(PoisonedError):
        here.subscriber.update()
    assert here.engine.paused
    assert here.subscriber.version is None
    assert heals(here)


@pytest.mark.parametrize("first", [False, True])
def test_an_engine_that_dies_while_it_writes_poisons(here: Followed, first: bool) -> None:
    here.engine.faults.dies["swap"] = first
    with pytest.raises(ApplyError, match="did not answer 'swap'"):
        here.subscriber.update()
    assert here.engine.paused
    assert here.subscriber.version is None
    here.engine.faults.dies.clear()
    assert heals(here)


@pytest.mark.parametrize("fault", ["shifted", "fewer", "stale"])
def test_mixed_up_answers_to_a_swap_poison(here: Followed, fault: str) -> None:
    getattr(here.engine.faults, fault).add("swap")
    with pytest.raises(PoisonedError, match="mixed up its ranks' answers to 'swap'"):
        here.subscriber.update()
    assert here.engine.paused
    assert here.subscriber.version is None
    getattr(here.engine.faults, fault).clear()
    assert heals(here)


def test_tensors_replaced_between_stage_and_swap_poison(here: Followed) -> None:
    """One rank has written when the other finds out."""
    staged = here.subscriber.stage()
    assert staged is not None
    live = here.engine.models[1].root.get_parameter("norm.weight")
    live.data = live.data.clone()
    with pytest.raises(PoisonedError, match="replaced live tensors"):
        here.subscriber.swap(staged)
    assert here.engine.paused
    assert heals(here)


def test_a_version_that_can_not_be_named_poisons(here: Followed) -> None:
    """Its weights are there, but what older ones cached may be as well."""
    here.engine.faults.name = ApplyError("the prefix cache could not be reset")
    with pytest.raises(ApplyError, match="prefix cache"):
        here.subscriber.update()
    assert here.engine.paused
    assert here.subscriber.version is None
    here.engine.faults.name = None
    assert heals(here)


# The engine's own loading


@pytest.mark.parametrize("kind", ["cast", "packed"])
def test_a_load_that_fails_is_taken_back(followed: Build, kind: str) -> None:
    here = followed(Sharding(tp=2, odd=("cast", "packed", "shadow")))
    here.publish(1)
    here.subscriber.update()
    here.publish(2)
    before = here.engine.bits()

    def fail_once(name: str) -> None:
        if kind in name:
            here.engine.models[1].failing = lambda _: None
            raise OSError("device lost")

    here.engine.models[1].failing = fail_once
    with pytest.raises(PartialApplyError, match="could not load version 2"):
        here.subscriber.update()
    assert here.engine.bits() == before
    assert here.subscriber.version == 1
    assert here.subscriber.scrub()
    here.subscriber.update()
    assert here.holds(2)


def test_a_load_that_fails_twice_poisons_and_heals(followed: Build) -> None:
    here = followed(Sharding(tp=2, odd=("cast",)))
    here.publish(1)
    here.subscriber.update()
    here.publish(2)

    def fail(name: str) -> None:
        if "cast" in name:
            raise OSError("device lost")

    here.engine.models[0].failing = fail
    with pytest.raises(PoisonedError, match="neither version 2 nor the old bits"):
        here.subscriber.update()
    assert here.engine.paused
    here.engine.models[0].failing = lambda _: None
    assert heals(here)
