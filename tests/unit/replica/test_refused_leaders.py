"""Leaders that an engine refuses: the one before them stays in charge."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from deltachain.errors import ConfigError, LeaderReplacedError, TensorMismatchError
from deltachain.publish import PublishConfig, Publisher
from deltachain.replica.messages import AgreeRequest, RankReply, RankRequest
from deltachain.replica.target import ReplicaTarget
from deltachain.store import MemoryStore
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.support.engine import Sharding
from tests.support.models import TinyModel
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


def _of_another_model(here: Followed) -> Subscriber:
    """A subscriber of these ranks to the chain of a model that they do not have."""
    store = MemoryStore()
    with Publisher(PublishConfig(url=store.url), store=store) as publisher:
        publisher.attach(TinyModel())
        publisher.flush()
    target = ReplicaTarget(here.engine, store.url, here.spool)
    return Subscriber(SubscribeConfig(url=store.url), target, store=store)


def test_a_leader_with_the_chain_of_another_model_replaces_nobody(here: Followed) -> None:
    staged = here.subscriber.stage()
    assert staged is not None
    stranger = _of_another_model(here)
    for _ in range(2):
        with pytest.raises(TensorMismatchError):
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
    here.engine.faults.refuses[1, call] = ConfigError("this rank does not want it")
    with pytest.raises(ConfigError, match="does not want it"):
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
    with pytest.raises(LeaderReplacedError):
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
    with pytest.raises(LeaderReplacedError):
        first.open()
    last.update()
    assert here.holds(2)
