"""One rank's refusal is every rank's refusal, and one rank's failure leaves no rank changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import msgspec
import pytest

from deltachain.errors import (
    ApplyError,
    BaseMismatchError,
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
    StartedReply,
    SwapReply,
)
from deltachain.types import StateDigest
from tests.support.engine import Faults, Sharding
from tests.support.values import present
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
    receipt = present(here.subscriber.update())
    assert receipt.previous is None
    assert here.engine.events == ["pause", "write", f"name {version}", "resume"]
    return here.holds(version) and here.subscriber.scrub()


Arrange = Callable[[Faults], object]
REFUSALS = (ApplyError("no memory"), TensorMismatchError("no way"))
UNWRITTEN: dict[str, tuple[Arrange, type[Exception], str]] = {
    **{
        f"rank {rank} refuses to {verb}: {error}": (
            lambda faults, at=(rank, verb), error=error: faults.refuses.update({at: error}),
            type(error),
            f"rank {rank}: {error.args[0]}",
        )
        for rank, verb, error in product((0, 1), ("stage", "poll"), REFUSALS)
    },
    **{
        f"dies in a {verb}, {first}": (
            lambda faults, verb=verb, first=first: faults.dies.update({verb: first}),
            ApplyError,
            f"did not answer '{verb}'",
        )
        for verb, first in product(("stage", "poll"), (False, True))
    },
    **{
        f"{fault} answers to {verb}": (
            lambda faults, fault=fault, verb=verb: getattr(faults, fault).add(verb),
            PoisonedError,
            f"mixed up its ranks' answers to '{verb}'",
        )
        for fault, verb in product(("shifted", "fewer", "stale"), ("stage", "poll"))
    },
    **{
        f"truncated answer to {verb}": (
            lambda faults, verb=verb: faults.truncated.add(verb),
            ApplyError,
            "cannot read a rank's reply",
        )
        for verb in ("stage", "poll")
    },
    **{
        f"{type(reply).__name__} to {verb}": (
            lambda faults, verb=verb, reply=reply: faults.mistyped.update({verb: reply}),
            PoisonedError,
            f"ranks' answers to '{verb}'",
        )
        for verb, reply in (
            ("stage", PendingReply()),
            ("poll", StartedReply()),
            ("poll", SwapReply(seconds=0, version=2, pid=1)),
        )
    },
}


@pytest.mark.parametrize("case", UNWRITTEN)
def test_a_stage_that_fails_has_written_nothing(here: Followed, case: str) -> None:
    arrange, error, why = UNWRITTEN[case]
    arrange(here.engine.faults)
    before = here.engine.bits()
    with pytest.raises(error, match=why) as caught:
        here.subscriber.update()
    assert "truncated" not in case or "same version of deltachain" in caught.value.hint
    assert here.engine.bits() == before
    assert here.engine.events == [], "it was not even paused"
    here.engine.faults = Faults()
    here.subscriber.update()
    assert here.holds(2)


def test_a_status_of_another_type_is_not_believed(here: Followed) -> None:
    here.engine.faults.mistyped["status"] = StartedReply()
    with pytest.raises(PartialApplyError, match="ranks' answers to 'status'"):
        here.subscriber.update()
    assert here.holds(1)
    assert "write" not in here.engine.events


UNKNOWN: dict[str, tuple[Arrange, type[Exception], str]] = {
    "cannot take back": (
        lambda faults: faults.writes.update({(0, "write", 4): LOST, (0, "write", 6): LOST}),
        PoisonedError,
        "so did taking it back",
    ),
    "cannot take back what another failed at": (
        lambda faults: faults.writes.update({(1, "write", 4): LOST, (0, "take back", 2): LOST}),
        PoisonedError,
        "could not be taken back on every other rank",
    ),
    **{
        f"dies, {first}": (
            lambda faults, first=first: faults.dies.update({"swap": first}),
            ApplyError,
            "did not answer 'swap'",
        )
        for first in (False, True)
    },
    **{
        f"{fault} answers": (
            lambda faults, fault=fault: getattr(faults, fault).add("swap"),
            PoisonedError,
            "mixed up its ranks' answers to 'swap'",
        )
        for fault in ("shifted", "fewer", "stale")
    },
    "mistyped answer": (
        lambda faults: faults.mistyped.update({"swap": StartedReply()}),
        PoisonedError,
        "ranks' answers to 'swap'",
    ),
    "truncated answer": (
        lambda faults: faults.truncated.add("swap"),
        ApplyError,
        "cannot read a rank's reply",
    ),
    # its weights are there, but what older ones cached may be as well
    "cannot be named": (
        lambda faults: setattr(faults, "name", ApplyError("the prefix cache could not be reset")),
        ApplyError,
        "prefix cache",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_swap_whose_end_is_unknown_poisons(here: Followed, case: str) -> None:
    arrange, error, why = UNKNOWN[case]
    arrange(here.engine.faults)
    with pytest.raises(error, match=why):
        here.subscriber.update()
    assert "resume" not in here.engine.events, "it stays paused"
    assert here.engine.paused
    assert here.subscriber.version is None
    here.engine.faults = Faults()
    assert heals(here)


# Before anything is written


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


@pytest.mark.parametrize(("ranks", "nth"), [([0], 1), ([1], 4), ([1], 20), ([0, 1], 3)])
def test_a_failure_on_one_rank_is_taken_back_on_all(
    here: Followed, ranks: list[int], nth: int
) -> None:
    here.engine.faults.writes.update({(rank, "write", nth): LOST for rank in ranks})
    before = here.engine.bits()
    with pytest.raises(PartialApplyError, match=f"rank {ranks[0]}: .*every rank has its old bits"):
        here.subscriber.update()
    assert not here.engine.faults.writes, "it was to fail"
    assert here.engine.bits() == before
    taken_back = ["take back"] if len(ranks) == 1 else []
    assert here.engine.events == ["pause", "write", *taken_back, "resume"]
    assert here.subscriber.version == 1
    assert here.subscriber.scrub()
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


def test_a_rank_that_forgot_its_ticket_keeps_the_others_from_writing(here: Followed) -> None:
    staged = present(here.subscriber.stage())
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


def test_tensors_replaced_between_stage_and_swap_poison(here: Followed) -> None:
    """One rank has written when the other finds out."""
    staged = present(here.subscriber.stage())
    live = here.engine.models[1].root.get_parameter("norm.weight")
    live.data = live.data.clone()
    with pytest.raises(PoisonedError, match="replaced live tensors"):
        here.subscriber.swap(staged)
    assert here.engine.paused
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
