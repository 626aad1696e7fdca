from pathlib import Path

import pytest
from torch import nn

from deltachain.errors import ConfigError, ControlPlaneError
from deltachain.presence.together import Together, newest_for
from deltachain.publish import PublishConfig, Publisher
from deltachain.replica.settings import ReplicaSettings
from deltachain.subscribe import Subscriber
from tests.support.models import TinyModel


@pytest.mark.parametrize(
    ("held", "newest"),
    [({"a": 3, "b": 3}, 4), ({"a": 3, "b": 2}, 3), ({"b": 7}, 8), ({"a": 9, "b": 0}, 1)],
)
def test_none_is_more_than_a_version_ahead_of_the_last(held: dict[str, int], newest: int) -> None:
    assert newest_for("a", held, 2, "g") == newest


@pytest.mark.parametrize(
    ("held", "why"),
    [
        ({"a": 3}, "1 of 2 replicas of group 'g'"),
        ({"a": 3, "b": 3, "c": 3}, "in addition to this one b, c"),
    ],
)
def test_a_group_waits_for_those_that_are_away(held: dict[str, int], why: str) -> None:
    with pytest.raises(ControlPlaneError, match=why):
        newest_for("a", held, 2, "g")


class Pair:
    """Two replicas of one group, and the publisher of their chain."""

    def __init__(self, folder: Path) -> None:
        self.url, self.board = str(folder / "chain"), folder / "replicas"
        self.model = TinyModel()
        self.publisher = Publisher(PublishConfig(url=self.url, when_busy="wait"))
        self.publisher.attach(self.model)
        self.both = [self.member("a"), self.member("b")]

    def member(self, name: str) -> Subscriber:
        held: nn.Module = TinyModel()
        held.load_state_dict(self.model.state_dict())
        found = Subscriber(self.url, held)
        found.group = Together(str(self.board), ("g", 2), name)
        return found

    def step(self) -> int:
        for parameter in self.model.parameters():
            parameter.data.add_(float(parameter.requires_grad))
        return self.publisher.publish().result().version

    @property
    def versions(self) -> list[int]:
        return [-1 if one.version is None else one.version for one in self.both]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_two_replicas_take_turns_up_to_the_head(pair: Pair) -> None:
    first, second = pair.both
    for _ in range(3):
        pair.step()
    with pytest.raises(ControlPlaneError, match="1 of 2 replicas"):
        first.update()  # it tells what it holds, and the other one has not
    second.update()
    assert pair.versions == [0, 1]
    with pytest.raises(ControlPlaneError, match=r"version 3 waits .* hold 2, the last one holds 0"):
        second.update()
    for one in (first, second, first, second, first):
        one.update()
        assert max(pair.versions) - min(pair.versions) <= 1
    assert pair.versions == [3, 3]
    assert first.update() is None


def test_a_version_that_is_asked_for_is_reached_or_refused(pair: Pair) -> None:
    first, second = pair.both
    pair.step()
    pair.step()
    with pytest.raises(ControlPlaneError):
        first.update(1)
    with pytest.raises(ControlPlaneError, match="version 2 waits"):
        second.update(2)
    second.update(1)
    first.update(2)
    assert pair.versions == [2, 1]


def test_a_replica_that_goes_back_holds_the_others(pair: Pair) -> None:
    first, second = pair.both
    pair.step()
    with pytest.raises(ControlPlaneError):
        first.update()
    second.update()
    first.update()
    first.rollback(0)
    pair.step()
    with pytest.raises(ControlPlaneError, match="the last one holds 0"):
        second.update()
    first.release()
    first.update()
    second.update()
    assert pair.versions == [2, 2]


def test_what_is_no_version_is_named(pair: Pair) -> None:
    (pair.board / "together" / "g").mkdir(parents=True)
    (pair.board / "together" / "g" / "b").write_bytes(b"many")
    pair.step()
    with pytest.raises(ControlPlaneError, match="together/g/b tells no version"):
        pair.both[0].update()


def test_a_group_needs_a_place_to_meet() -> None:
    with pytest.raises(ConfigError, match="no place at which replicas meet"):
        ReplicaSettings.of({"DELTACHAIN_URL": "x", "DELTACHAIN_TOGETHER": "g@2"})
    with pytest.raises(ConfigError, match="a number above 1"):
        ReplicaSettings.of({"DELTACHAIN_URL": "x", "DELTACHAIN_TOGETHER": "g@1"})
