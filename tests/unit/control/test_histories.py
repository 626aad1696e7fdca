"""A number is no version: replicas that hold another history under the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from deltachain.chain.chain import Chain
from deltachain.control.comparison import compare
from deltachain.control.fleet import Fleet
from deltachain.control.replica_client import ReplicaClient
from deltachain.control.roster import ReplicaAnswer
from deltachain.errors import ChainError, ControlPlaneError, StoreWentBackError
from deltachain.publish import PublishConfig, Publisher
from deltachain.replica.leader import Leader
from deltachain.status import HealthLimits
from deltachain.subscribe.subscriber import LOOK_BACK
from tests.support.models import train_
from tests.unit.control.replicas import app_of, served
from tests.unit.control.statuses import status
from tests.unit.replica.replicas import Followed
from tests.unit.subscribe.accidents import copy, restore

OTHER = "0" * 64


@pytest.fixture
def fleet(leader: Leader) -> Iterator[Fleet]:
    with ExitStack() as stack:
        url = stack.enter_context(served(app_of(leader, is_open=True)))
        yield stack.enter_context(Fleet([url]))


def digest(here: Followed, version: int) -> str:
    return Chain.open(here.store).read(version).digest


def lose(here: Followed, version: int, *, again: int | None) -> None:
    """Restore the store as it was at a version; a restarted trainer goes on from there, if any."""
    earlier = copy(here.store)
    for key in list(earlier):
        if key.startswith("manifests/") and int(key[10:30]) > version:
            del earlier[key]
    earlier.pop("head.json", None)
    restore(here.store, earlier)
    if again is None:
        return
    config = PublishConfig(url=here.store.url, anchor_factor=1e6)
    with Publisher(config, store=here.store).attach(here.model) as publisher:
        for seed in range(again):
            train_(here.model, 100 + seed, share=0.05)
            publisher.publish()
            publisher.flush()


def test_a_version_of_the_lost_history_is_not_the_announced_one(
    here: Followed, leader: Leader, fleet: Fleet
) -> None:
    here.publish(3, 4)
    leader.update(4)
    lost = digest(here, 4)
    lose(here, 1, again=0)
    for version in (2, 3):
        manifest = digest(here, version)
        announced = fleet.announce(version, manifest=manifest, deadline=1.0)
        assert not announced.enough
        assert announced.stragglers == tuple(announced.held)
        assert "StoreWentBackError" in "".join(announced.trouble.values())
        assert not fleet.announce(version, deadline=1.0).enough  # nor by its number alone
    held = leader.subscriber.held
    assert held is not None
    assert held.manifest == lost


def test_the_same_number_of_another_history_is_told_apart(
    here: Followed, leader: Leader, fleet: Fleet
) -> None:
    leader.update(2)
    lose(here, 0, again=1)
    manifest = digest(here, 2)
    assert leader.status().manifest != manifest
    for told in (manifest, ""):
        announced = fleet.announce(2, manifest=told, deadline=1.0)
        assert not announced.enough
        assert list(announced.held.values()) == [None]
        assert "ForkedChainError" in "".join(announced.trouble.values())


def test_who_holds_a_later_version_of_this_history_holds_the_announced_one(
    here: Followed, leader: Leader, fleet: Fleet
) -> None:
    leader.update(2)
    announced = fleet.announce(1, manifest=digest(here, 1), deadline=20.0)
    assert announced.enough
    assert list(announced.held.values()) == [2]


def test_an_announced_version_that_is_another_in_the_store_is_refused(
    leader: Leader, fleet: Fleet
) -> None:
    leader.update(1)
    for version in (1, 2):
        assert not fleet.announce(version, manifest=OTHER, deadline=1.0).enough


def test_a_replica_whose_store_is_away_holds_what_it_proves_to_hold(
    here: Followed, leader: Leader, fleet: Fleet
) -> None:
    leader.update(2)
    manifest = digest(here, 2)
    here.faulty.down = True
    assert fleet.announce(2, manifest=manifest, deadline=20.0).enough
    assert not fleet.announce(2, manifest=OTHER, deadline=0.5).enough
    assert not fleet.announce(2, deadline=0.5).enough  # nobody can say which 2 that is
    here.faulty.mend()


def test_a_refusal_is_told_by_name(leader: Leader) -> None:
    leader.update()
    with served(app_of(leader, is_open=True)) as url, ReplicaClient(url) as client:
        with pytest.raises(ControlPlaneError) as caught:
            client.update(99)
        assert caught.value.refusal == "ChainError"
        status = client.status()
        assert (status.trouble, status.ready) == ("", True)  # what was asked for was at fault
        assert status.manifest == leader.status().manifest
        with pytest.raises(ControlPlaneError) as caught:
            client.update(1, manifest="not a digest")
        assert caught.value.refusal == ""


@pytest.mark.parametrize("what", ["store", "identity", "all"])
def test_a_store_that_lost_what_is_held_ends_readiness(
    here: Followed, leader: Leader, what: str
) -> None:
    leader.update()
    newest = copy(here.store)
    kept = {
        "store": {key: data for key, data in newest.items() if "manifests/" not in key},
        "identity": {key: data for key, data in newest.items() if key != "chain.json"},
        "all": {},
    }[what]
    looks = leader.subscriber.follow(stop=leader._stop, looked=leader._looked)
    turns = iter(range(100))

    def wait(_: float) -> bool:
        turn = next(turns)
        ready = leader.status().ready
        if turn == 1:
            assert ready
            restore(here.store, kept)
        elif turn == 2 * LOOK_BACK:
            status = leader.status()
            assert (status.ready, status.lag_versions or 0) == (False, 0)
            assert status.reason == status.doubt != ""
            restore(here.store, newest)
        elif turn == 2 * LOOK_BACK + 1:
            assert ready
            leader.end()
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leader.subscriber.told, "wait", wait)
        assert list(looks) == []


def test_a_lag_is_never_below_nothing(here: Followed, leader: Leader) -> None:
    leader.update()
    lose(here, 0, again=None)
    with pytest.raises(StoreWentBackError):
        leader.update()
    status = leader.status()
    assert (status.version, status.lag_versions) == (2, None)
    assert issubclass(StoreWentBackError, ChainError)


def test_replicas_with_two_histories_say_so() -> None:
    answers: dict[str, ReplicaAnswer] = {
        "http://a": status(3, manifest="a"),
        "http://b": status(3, manifest="b", doubt="the store went back"),
        "http://c": status(4, manifest="c"),
        "http://x": ControlPlaneError("away"),
    }
    doubts = {row.engine: row.doubt for row in compare(answers, HealthLimits())}
    assert [doubts[url] for url in answers] == [
        "others hold another version 3",
        "the store went back",
        "",
        "",
    ]
