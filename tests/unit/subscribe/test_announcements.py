"""How a follow loop uses the feed of its store."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deltachain.chain.chain import Chain
from deltachain.errors import StoreUnavailableError
from deltachain.format.keys import manifest_key
from deltachain.publish import PublishConfig, Publisher
from deltachain.retry import between_polls
from deltachain.status import HealthLimits
from deltachain.store import MemoryStore
from deltachain.store.base import Feed, OnChange
from deltachain.store.hf.store import _POLL_S
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain.subscribe.announcements import RARE, Announcements, FeedAgreement
from deltachain.subscribe.subscriber import LOOK_BACK
from deltachain.subscribe.targets.base import HeldVersion
from tests.support.models import plain_model, tensors_of, train_
from tests.unit.subscribe.clock import Clock

POLL_S = 10.0


class ToldStore(MemoryStore):
    """A store whose feed tells what a test says."""

    class _Feed(Feed):
        is_live = True
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    def __init__(self) -> None:
        super().__init__()
        self.made = ToldStore._Feed()
        self.tell: OnChange = lambda _: None

    def feed(self, prefix: str, on_change: OnChange) -> Feed:
        assert prefix == "manifests/"
        self.tell = on_change
        return self.made


class Told:
    """A publisher, and a follower whose waits take no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.model, self.step = ToldStore(), plain_model(), 0
        self.publisher = Publisher(PublishConfig(url=self.store.url), store=self.store)
        self.publisher.attach(self.model)
        config = SubscribeConfig(url=self.store.url, poll_s=POLL_S)
        self.follower = Subscriber(config, tensors_of(self.model), store=self.store)
        self.clock = Clock(self.follower, monkeypatch)

    def publish(self) -> None:
        self.step += 1
        train_(self.model, self.step)
        self.publisher.publish(step=self.step).result()

    def publish_and_tell(self) -> None:
        self.publish()
        self.store.tell(manifest_key(self.publisher.version))

    def follow(self, *happens: Callable[[], object]) -> list[int]:
        """Poll intervals of each wait, while something happens in each."""
        self.clock.happens = list(happens)
        self.clock.run(self.follower)
        assert self.follower.version == self.publisher.version
        return [RARE if s > 1.25 * POLL_S else 1 for s in self.clock.waits]


def nothing() -> None:
    pass


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


def test_polls_are_rare_while_the_feed_tells_what_they_find(told: Told) -> None:
    assert told.follow(nothing, told.publish_and_tell, nothing, told.publish_and_tell) == [RARE] * 5
    assert told.store.made.is_closed


def test_rare_polls_of_the_hub_are_no_silence_that_alarms_anybody() -> None:
    longest = between_polls(RARE * _POLL_S).first_s
    silence_s = HealthLimits().silence_s
    assert silence_s is not None
    assert longest < silence_s


def test_polls_are_as_often_as_ever_without_a_live_feed(told: Told) -> None:
    told.store.made.is_live = False
    assert told.follow(nothing, told.publish, nothing) == [1] * 4


def test_silent_feed_is_not_relied_upon_until_it_tells_again(told: Told) -> None:
    waits = told.follow(told.publish, nothing, told.publish, told.publish_and_tell, nothing)
    assert waits == [RARE, 1, 1, 1, RARE, RARE]


def test_late_announcement_counts(told: Told) -> None:
    def late() -> None:
        told.store.tell(manifest_key(told.publisher.version))

    assert told.follow(told.publish, late, nothing) == [RARE, 1, RARE, RARE]


def test_false_announcement_costs_rare_polls_until_one_is_true(told: Told) -> None:
    def lie() -> None:
        told.store.tell(manifest_key(10**15))

    waits = told.follow(lie, lie, nothing, told.publish_and_tell, nothing)
    assert waits == [RARE, 1, 1, 1, RARE, RARE]


def test_announcement_that_runs_ahead_of_the_store_is_polled_for(told: Told) -> None:
    def early() -> None:
        told.store.tell(manifest_key(told.publisher.version + 1))

    assert told.follow(early, nothing, told.publish, nothing) == [RARE, 1, 1, RARE, RARE]


def test_other_keys_announce_nothing(told: Told) -> None:
    def other() -> None:
        for key in ("manifests/7.json", f"{manifest_key(7)}.sig", "manifests/x", "head.json"):
            told.store.tell(key)

    assert told.follow(other, other) == [RARE] * 3
    assert not told.follower.told.is_set()


def test_versions_before_the_feed_was_live_are_no_silence(told: Told) -> None:
    told.store.made.is_live = False

    def connect() -> None:
        told.publish()
        told.store.made.is_live = True
        told.store.tell("")

    assert told.follow(connect, nothing) == [1, RARE, RARE]


def test_store_that_fails_is_polled_as_without_a_feed(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(_: object) -> None:
        raise StoreUnavailableError("down")

    def fail() -> None:
        monkeypatch.setattr(told.follower.chain, "later", down)

    def mend() -> None:
        monkeypatch.delattr(told.follower.chain, "later")

    told.follow(fail, mend, nothing)
    assert [s > 5 * POLL_S for s in told.clock.waits] == [True, False, True, True]


def test_rare_polls_look_back_as_often_as_time_goes(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    told.follow(nothing)
    told.clock.stop.clear()
    told.clock.happens = [nothing] * 2
    looks, real = [], told.follower.watch.look

    def counted(chain: Chain, held: HeldVersion) -> bool:
        looks.append(held)
        return real(chain, held)

    monkeypatch.setattr(told.follower.watch, "look", counted)
    told.clock.run(told.follower)
    assert RARE > LOOK_BACK
    assert len(looks) == 2


def test_wake_comes_with_each_new_manifest_and_each_gap() -> None:
    store, woken = ToldStore(), [0]

    def wake() -> None:
        woken[0] += 1

    with Announcements(store, wake) as announcements:
        store.tell(manifest_key(5))
        assert woken == [1]
        store.tell("")
        assert woken == [2]
        assert announcements.take() == 5
        assert announcements.take() == -1
        announcements.compare(5, before=4, found=4)  # a lie
        for number in range(100):
            store.tell(manifest_key(number))
        assert woken == [2]  # a flood wakes nobody
    assert store.made.is_closed


@pytest.mark.parametrize(
    ("announced", "before", "found", "holds"),
    [
        (-1, 4, 4, True),
        (5, 4, 5, True),
        (5, 4, 4, False),
        (-1, 4, 5, False),
        (3, 4, 5, False),
        (3, 4, 4, True),
        (5, 4, 9, True),
        (9, 4, 5, True),
    ],
)
def test_agreement(announced: int, before: int, found: int, holds: bool) -> None:
    assert FeedAgreement().compare(announced, before, found).holds is holds


def test_agreement_returns_with_what_was_missing() -> None:
    lied = FeedAgreement().compare(5, 4, 4)
    assert not lied.compare(-1, 4, 4).holds
    assert lied.announce(6).compare(6, 4, 6).holds
    silent = FeedAgreement().compare(-1, 4, 6)
    assert not silent.announce(5).holds
    assert silent.announce(6).holds
