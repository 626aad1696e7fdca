import gc
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from deltachain import errors
from deltachain.chain.chain import Chain
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.revert import revert
from deltachain.replica.messages import AgreeRequest, RankReply, RankRequest
from deltachain.replica.moved_tensors import LiveRecord
from deltachain.replica.target import ReplicaTarget
from deltachain.store import MemoryStore
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.support.engine import FakeEngine, Sharding
from tests.support.models import TinyModel
from tests.support.values import eventually, present
from tests.unit.replica.replicas import SHAPES, Followed, led


@pytest.mark.parametrize("shape", ["tp1", "tp2", "tp2pp2"])
def test_running_and_restarted_engines_go_back(shape: str, tmp_path: Path) -> None:
    here = Followed(SHAPES[shape], tmp_path)
    here.publish(1, 2, 3)
    here.subscriber.update()
    assert here.holds(3)
    chain = Chain.open(here.store)
    revert(chain, chain.read(1))
    receipt = present(here.subscriber.update())
    assert receipt.version == 4
    assert here.holds(1)
    revert(chain, chain.read(2))  # the engine is down
    spool = tmp_path / "restarted"
    engine = FakeEngine(SHAPES[shape], tmp_path / "model", spool)
    target = ReplicaTarget(engine, here.store.url, spool)
    config = SubscribeConfig(url=here.store.url)
    with Subscriber(config, target, store=here.store) as subscriber:
        subscriber.update()
        assert subscriber.version == 5
        assert engine.holds(here.truth[2])


SLOTS = 8


def experts(dtype: torch.dtype, changed: int) -> nn.Parameter:
    """Return experts made of one layer, in each of which some elements are changed."""
    torch.manual_seed(changed)
    stacked = torch.randn(1, 40, 50).to(dtype).repeat(SLOTS, 1, 1)
    for slot in stacked.view(SLOTS, -1):
        slot[torch.randint(2000, (changed,))] = torch.randn(changed).to(dtype)
    return nn.Parameter(stacked, requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("changed", [1, 3, 20])
def test_two_slots_that_change_places_are_seen(dtype: torch.dtype, changed: int) -> None:
    live = experts(dtype, changed)
    model: Any = SimpleNamespace(tensors=lambda: {"experts.weight": live})
    record = LiveRecord(model, ())
    assert not record.difference(model)
    bits = live.data.view(torch.uint8)
    for one, other in combinations(range(SLOTS), 2):
        before = bits.clone()
        bits[one], bits[other] = before[other], before[one]
        assert "holds other bits" in record.difference(model)
        bits.copy_(before)


def test_slots_that_are_the_same_may_change_places() -> None:
    live = nn.Parameter(torch.ones(SLOTS, 40, 50))
    model: Any = SimpleNamespace(tensors=lambda: {"experts.weight": live})
    record = LiveRecord(model, ())
    live.data.copy_(live.data.flip(0))
    assert not record.difference(model)


@pytest.fixture
def here(followed: "Build") -> Followed:
    """Two ranks that hold version 1 of 2, led by the subscriber."""
    here = followed(Sharding(tp=2))
    here.publish(1)
    here.subscriber.update()
    here.publish(2)
    return here


def _of_another_model(here: Followed) -> Subscriber:
    """A subscriber of these ranks to the chain of a model that they do not have."""
    store = MemoryStore()
    with Publisher(PublishConfig(url=store.url), store=store) as publisher:
        publisher.attach(TinyModel())
        publisher.flush()
    target = ReplicaTarget(here.engine, store.url, here.spool)
    return Subscriber(SubscribeConfig(url=store.url), target, store=store)


def test_a_leader_with_the_chain_of_another_model_replaces_nobody(here: Followed) -> None:
    staged = present(here.subscriber.stage())
    stranger = _of_another_model(here)
    for _ in range(2):
        with pytest.raises(errors.TensorMismatchError):
            stranger.open()
    assert here.holds(1)
    here.subscriber.swap(staged)
    assert here.holds(2)
    assert here.subscriber.scrub()
    here.publish(3)
    here.subscriber.update()
    assert here.holds(3)
    assert here.subscriber.rollback(1).version == 1
    assert here.holds(1)


@pytest.mark.parametrize("call", ["attach", "agree"])
def test_a_leader_that_one_rank_refuses_replaces_nobody(here: Followed, call: str) -> None:
    later = here.subscribe()
    here.engine.faults.refuses[1, call] = errors.ConfigError("this rank does not want it")
    with pytest.raises(errors.ConfigError, match="does not want it"):
        later.open()
    here.engine.faults.refuses.clear()
    target = later.target
    assert isinstance(target, ReplicaTarget)
    target.pause()
    target.resume()
    here.subscriber.update()
    assert here.holds(2)
    here.publish(3)
    later.open()
    with pytest.raises(errors.LeaderReplacedError):
        here.subscriber.update()
    later.update()
    assert here.holds(3)


def test_of_two_that_attach_at_once_the_last_leads(here: Followed) -> None:
    first, last = here.subscribe(), here.subscribe()
    call, asked = here.engine.call, list[str]()

    def between(request: RankRequest) -> Sequence[RankReply]:
        if isinstance(request, AgreeRequest) and not asked:
            asked.append("last")
            last.open()
        return call(request)

    here.engine.call = between  # type: ignore[method-assign]
    with pytest.raises(errors.LeaderReplacedError):
        first.open()
    last.update()
    assert here.holds(2)


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


@pytest.mark.parametrize("at", ["poll", "swap"])
def test_rounds_that_fail_keep_neither_spools_nor_staged_bits(
    followed: Build, at: str, request: pytest.FixtureRequest
) -> None:
    """Until the next one, and without a collection of cycles, which an engine does rarely."""
    here = followed(Sharding(tp=2))
    gc.disable()
    request.addfinalizer(gc.enable)
    with led(here, follow=True) as leader:
        leader.start()
        here.engine.faults.refuses[0, at] = errors.PartialApplyError("no")
        here.publish(1)
        eventually(lambda: leader.tally.failures > 7)
        assert len(here.spools()) < 4
        assert len(here.engine.services[1].rank.staged) < 5


def test_a_replica_that_never_was_at_the_head_is_not_ready(followed: Build) -> None:
    here = followed()
    here.publish(1, 2, 3)
    with led(here) as leader:
        leader.update(1)
        status = leader.status()
        assert (status.ready, status.reason) == (False, "it has not caught up yet")
        leader.update()
        assert leader.status().ready


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
        with pytest.raises(errors.ChainError, match="cannot roll back from version None to 4"):
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
        with pytest.raises(errors.PoisonedError, match="stays paused"):
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
            fork = errors.ForkedChainError("two chains")
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
        held = present(leader.subscriber.held)
        assert leader.update(2, manifest=held.manifest) is None
        other = here.subscribe()
        other.rollback(1)
        assert here.holds(1)
        with pytest.raises(errors.LeaderReplacedError):
            leader.update(2, manifest=held.manifest)
        assert not leader.status().ready


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
