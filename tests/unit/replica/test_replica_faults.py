from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from threading import Event
from typing import Any, TypeAlias
from unittest import mock

import msgspec
import pytest

import deltachain
from deltachain import errors
from deltachain.chain.chain import Chain
from deltachain.replica import leader as engine_watch
from deltachain.replica import target as client
from deltachain.replica.leader import EngineWatch, Leader
from deltachain.replica.messages import (
    PendingReply,
    PollRequest,
    RankReply,
    StagedReply,
    StartedReply,
    SwapReply,
)
from deltachain.replica.pause import PauseHolds
from deltachain.replica.target import PreparedSwap
from deltachain.status import Status
from deltachain.types import StateDigest
from tests.support.engine import Faults, Sharding
from tests.support.values import eventually, present
from tests.unit.replica.replicas import Followed, led


def committed_at(here: Followed, version: int) -> float:
    """Time of a version's commit, in seconds since 1970."""
    return Chain.open(here.store).read(version).manifest.time


def test_a_replica_cut_off_from_its_store_is_not_ready_and_says_so(followed: Build) -> None:
    here = followed()
    with led(here, follow=True, max_silence_s=0.2) as leader:
        leader.start()
        here.publish(1)
        eventually(lambda: leader.status().version == 1)
        eventually(lambda: leader.status().ready)  # a slow machine is silent for a moment
        before = leader.status()
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
        again = present(leader.status().looked_at)
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
        with pytest.raises(errors.StoreError):
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
        with pytest.raises(errors.ChainError):
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
        watched_ranks.publish(2)
        leader.update()
        assert not watched_ranks.engine.paused, "nobody paused it this time"


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


def test_a_look_while_a_pause_takes_effect_does_not_take_it_for_that_of_others(
    watched_ranks: Followed,
) -> None:
    engine, holds = watched_ranks.engine, PauseHolds(watched_ranks.engine)
    pause = engine.pause

    def looked_at(*, in_doubt: bool = False) -> None:
        pause(in_doubt=in_doubt)
        holds.look()

    with mock.patch.object(engine, "pause", looked_at):
        holds.hold()
    holds.look()
    assert not holds.why
    holds.go_on()
    assert not engine.paused


def test_a_pause_that_failed_is_not_ours(watched_ranks: Followed) -> None:
    engine, holds = watched_ranks.engine, PauseHolds(watched_ranks.engine)
    engine.faults.pause = errors.ApplyError("the engine is gone")
    with pytest.raises(errors.ApplyError, match="gone"):
        holds.hold()
    engine.paused = True  # it has taken effect all the same
    holds.look()
    assert holds.why == "paused by another client"


def test_a_leader_that_was_replaced_says_so_without_being_called(watched_ranks: Followed) -> None:
    with watched(watched_ranks) as leader, led(watched_ranks) as other:
        other.start()
        found = has(leader, "rank 0: another leader has attached")
        assert found.fault == found.reason
        assert isinstance(leader.trouble, errors.LeaderReplacedError)
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
        refuses = mock.Mock(side_effect=errors.ApplyError("the engine has released its weights"))
        with mock.patch.object(leader.target, "look", refuses):
            count = refuses.call_count
            has(leader, "asleep")
            Event().wait(0.4)  # longer than the silence allowed
            assert refuses.call_count <= count + 1  # one may have been on its way
            assert leader.status().fault == ""


def test_an_update_session_of_another_client_is_an_answer(watched_ranks: Followed) -> None:
    with watched(watched_ranks) as leader:
        session = mock.Mock(side_effect=errors.PartialApplyError("an open update session"))
        with mock.patch.object(leader.target, "look", session):
            eventually(lambda: session.call_count > 50)
            assert leader.status().ready


Build = Callable[..., Followed]

LOST = OSError("device lost")
ONE = StateDigest(0, 1)


def heals(here: Followed, version: int = 2) -> bool:
    """Whether the next update leads out of it, from nothing."""
    here.engine.events.clear()
    receipt = present(here.subscriber.update())
    assert receipt.previous is None
    assert here.engine.events == ["pause", "write", f"name {version}", "resume"]
    return here.holds(version) and here.subscriber.scrub()


REFUSALS = (errors.ApplyError("no memory"), errors.TensorMismatchError("no way"))
MIXED = ("shifted", "fewer", "stale")
WRITTEN = SwapReply(seconds=0, version=2, pid=1)

Case: TypeAlias = tuple[Faults, type[errors.DeltaChainError], str]
"""Faults, and the error with its words that they lead to."""

UNWRITTEN: dict[str, Case] = {
    **{
        f"rank {rank} refuses to {verb}: {error}": (
            Faults(refuses={(rank, verb): error}),
            type(error),
            f"rank {rank}: {error.args[0]}",
        )
        for rank, verb, error in product((0, 1), ("stage", "poll"), REFUSALS)
    },
    **{
        f"dies in a {verb}, {first}": (
            Faults(dies={verb: first}),
            errors.ApplyError,
            f"did not answer '{verb}'",
        )
        for verb, first in product(("stage", "poll"), (False, True))
    },
    **{
        f"{fault} answers to {verb}": (
            Faults(**{fault: {verb}}),  # type: ignore[arg-type]
            errors.PoisonedError,
            f"mixed up its ranks' answers to '{verb}'",
        )
        for fault, verb in product(MIXED, ("stage", "poll"))
    },
    **{
        f"truncated answer to {verb}": (
            Faults(truncated={verb}),
            errors.ApplyError,
            "cannot read a rank's reply",
        )
        for verb in ("stage", "poll")
    },
    **{
        f"{type(reply).__name__} to {verb}": (
            Faults(mistyped={verb: reply}),
            errors.PoisonedError,
            f"ranks' answers to '{verb}'",
        )
        for verb, reply in (("stage", PendingReply()), ("poll", StartedReply()), ("poll", WRITTEN))
    },
}


@pytest.mark.parametrize("case", UNWRITTEN)
def test_a_stage_that_fails_has_written_nothing(here: Followed, case: str) -> None:
    here.engine.faults, error, why = UNWRITTEN[case]
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
    with pytest.raises(errors.PartialApplyError, match="ranks' answers to 'status'"):
        here.subscriber.update()
    assert here.holds(1)
    assert "write" not in here.engine.events


UNKNOWN: dict[str, Case] = {
    "cannot take back": (
        Faults(writes={(0, "write", 4): LOST, (0, "write", 6): LOST}),
        errors.PoisonedError,
        "so did taking it back",
    ),
    "cannot take back what another failed at": (
        Faults(writes={(1, "write", 4): LOST, (0, "take back", 2): LOST}),
        errors.PoisonedError,
        "could not be taken back on every other rank",
    ),
    **{
        f"dies, {first}": (Faults(dies={"swap": first}), errors.ApplyError, "did not answer 'swap'")
        for first in (False, True)
    },
    **{
        f"{fault} answers": (
            Faults(**{fault: {"swap"}}),  # type: ignore[arg-type]
            errors.PoisonedError,
            "mixed up its ranks' answers to 'swap'",
        )
        for fault in MIXED
    },
    "mistyped answer": (
        Faults(mistyped={"swap": StartedReply()}),
        errors.PoisonedError,
        "ranks' answers to 'swap'",
    ),
    "truncated answer": (
        Faults(truncated={"swap"}),
        errors.ApplyError,
        "cannot read a rank's reply",
    ),
    # its weights are there, but what older ones cached may be as well
    "cannot be named": (
        Faults(name=errors.ApplyError("the prefix cache could not be reset")),
        errors.ApplyError,
        "prefix cache",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_swap_whose_end_is_unknown_poisons(here: Followed, case: str) -> None:
    here.engine.faults, error, why = UNKNOWN[case]
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
    with pytest.raises(errors.BaseMismatchError):
        here.subscriber.update()
    assert here.engine.bits() == before
    assert here.engine.events == []


def test_a_rank_that_leaves_elements_out_is_found_out(
    here: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies_when_polled(here, monkeypatch, lambda reply: msgspec.structs.replace(reply, effects=()))
    with pytest.raises(
        errors.BaseMismatchError, match=r"the ranks would write [\d,]+ of [\d,]+ elements"
    ):
        here.subscriber.update()
    assert here.engine.events == []


def test_a_rank_that_never_ends_staging_is_given_up(
    here: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "STAGE_S", 0.05)
    handlers: dict[Any, Any] = here.engine.services[1]._handlers
    monkeypatch.setitem(handlers, PollRequest, lambda _: PendingReply())
    with pytest.raises(errors.ApplyError, match="some rank did not stage within"):
        here.subscriber.update()
    assert here.engine.events == []


def test_an_engine_that_does_not_pause_is_not_written_to(here: Followed) -> None:
    here.engine.faults.pause = errors.ApplyError("busy")
    with pytest.raises(errors.PartialApplyError, match="did not pause"):
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
    with pytest.raises(
        errors.PartialApplyError, match=f"rank {ranks[0]}: .*every rank has its old bits"
    ):
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
    with pytest.raises(errors.PartialApplyError):
        here.subscriber.update()
    assert (1, "take back", 3) in here.engine.faults.writes
    assert here.engine.bits() == before


def test_a_rank_that_forgot_its_ticket_keeps_the_others_from_writing(here: Followed) -> None:
    staged = present(here.subscriber.stage())
    here.engine.services[0].rank.keep([])
    before = here.engine.bits()
    with pytest.raises(errors.PartialApplyError, match="rank 0: nothing is staged under ticket"):
        here.subscriber.swap(staged)
    assert here.engine.bits() == before
    assert here.engine.events[-1] == "resume"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_rollback_leaves_the_newer_version(here: Followed, rank: int) -> None:
    here.subscriber.update()
    here.engine.faults.writes[rank, "take back", 5] = LOST
    with pytest.raises(errors.PartialApplyError):
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
    with pytest.raises(errors.PoisonedError):
        here.subscriber.update()
    assert here.engine.paused
    assert here.subscriber.version is None
    assert heals(here)
    here.publish(3, share=1.0)
    staged = present(here.subscriber.stage())
    assert isinstance(staged.prepared, PreparedSwap)
    assert not staged.prepared.can_undo
    assert all(not one.rank.staged[staged.prepared.ticket].placed for one in here.engine.services)
    here.subscriber.swap(staged)
    assert here.holds(3)


def test_tensors_replaced_between_stage_and_swap_poison(here: Followed) -> None:
    """One rank has written when the other finds out."""
    staged = present(here.subscriber.stage())
    live = here.engine.models[1].root.get_parameter("norm.weight")
    live.data = live.data.clone()
    with pytest.raises(errors.PoisonedError, match="replaced live tensors"):
        here.subscriber.swap(staged)
    assert here.engine.paused
    assert heals(here)


# The engine's own loading


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        pytest.param("cast", 1, id="a cast, taken back"),
        pytest.param("packed", 1, id="a packed one, taken back"),
        pytest.param("cast", 9, id="taking it back fails too"),
    ],
)
def test_a_load_that_fails_is_taken_back_or_poisons(followed: Build, kind: str, times: int) -> None:
    here = followed(Sharding(tp=2, odd=("cast", "packed", "shadow")))
    here.publish(1)
    here.subscriber.update()
    here.publish(2)
    before, left = here.engine.bits(), [times]

    def fail(name: str) -> None:
        if kind in name and left[0]:
            left[0] -= 1
            raise OSError("device lost")

    here.engine.models[1].failing = fail
    error = errors.PartialApplyError if times == 1 else errors.PoisonedError
    why = "could not load version 2" if times == 1 else "neither version 2 nor the old bits"
    with pytest.raises(error, match=why):
        here.subscriber.update()
    if times > 1:
        assert here.engine.paused
        left[0] = 0
        assert heals(here)
        return
    assert here.engine.bits() == before
    assert here.subscriber.version == 1
    assert here.subscriber.scrub()
    here.subscriber.update()
    assert here.holds(2)
