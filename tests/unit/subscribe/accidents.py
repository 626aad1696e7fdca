"""A training run with its followers, and things that happen to its store."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from deltachain.checkpoint import WEIGHTS_FILE
from deltachain.errors import DeltaChainError
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore, Store
from deltachain.subscribe import ApplyReceipt, SubscribeConfig, Subscriber
from deltachain.subscribe.subscriber import LOOK_BACK
from tests.support.faults import FaultyStore
from tests.support.models import Replica, State, TinyModel, bits_of, same, tensors_of, train_
from tests.support.values import present
from tests.unit.subscribe.clock import Clock

TIED = {"embed.weight", "head.weight"}
"""Two names of one weight: a target may have either."""


class Run:
    """A training run and those who follow it; its chain begins when something is published.

    Attributes:
        faulty: Its store, to which faults can be added.
        zeros: A target in memory that holds nothing.
        mirror: A folder that is not there yet.
        states: The bits of each version.
    """

    def __init__(self, store: MemoryStore, mirror: Path) -> None:
        self.store, self.mirror = store, mirror
        self.faulty = FaultyStore(store)
        self.model = TinyModel()
        self.zeros = tensors_of(self.model)
        self.states: list[State] = []

    @cached_property
    def publisher(self) -> Publisher:
        """Attached to the model; version 0 is committed. Anchors are added by nobody."""
        config = PublishConfig(url=self.store.url, anchor_factor=1e6)
        publisher = Publisher(config, store=self.store).attach(self.model)
        self.states.append(bits_of(self.model))
        return publisher

    def publish(self, *seeds: int, share: float = 0.02) -> None:
        """Commit version 0 if there is none; train and publish one more version for each seed."""
        publisher = self.publisher
        for seed in seeds:
            train_(self.model, seed, share=share)
            publisher.publish(step=seed)
            publisher.flush()
            self.states.append(bits_of(self.model))

    def add_anchor(self) -> None:
        """Put an anchor behind the newest version."""
        session = present(self.publisher._session)
        assert session.add_anchor(session.begin_anchor(), topic="").kind == "anchor"

    def subscribe(self, target: Any, on: Store | None = None, **settings: Any) -> Subscriber:
        settings.setdefault("poll_s", 0.001)
        config = SubscribeConfig(url=self.store.url, **settings)
        return Subscriber(config, getattr(target, "target", target), store=on or self.store)

    def join(
        self, target: Any, *versions: int, on: Store | None = None, **settings: Any
    ) -> Subscriber:
        """Who applied some versions, or else the newest one."""
        subscriber = self.subscribe(target, on, **settings)
        for version in versions or (None,):
            subscriber.update(version)
        return subscriber

    def matches(self, target: Any, version: int = -1) -> bool:
        """Whether a target has all bits of a version, or else of the newest one."""
        found, expected = bits(target), self.states[version]
        assert expected.keys() - found.keys() <= TIED
        return same(found, expected)

    def close(self) -> None:
        if "publisher" in self.__dict__:
            with suppress(DeltaChainError):
                self.publisher.close()


def bits(target: Any) -> State:
    if isinstance(target, Replica):
        return target.bits()
    return bits_of(load_file(target / WEIGHTS_FILE) if isinstance(target, Path) else target)


@contextmanager
def unchanged(target: Any) -> Iterator[None]:
    """Whatever is done meanwhile writes nothing to the target."""
    before = bits(target)
    yield
    assert same(bits(target), before)


def versions(receipts: list[ApplyReceipt]) -> list[tuple[int | None, int]]:
    return [(receipt.previous, receipt.version) for receipt in receipts]


class Told:
    """What a follower says after each turn."""

    def __init__(self, subscriber: Subscriber, clock: Clock) -> None:
        self.subscriber, self.clock = subscriber, clock
        self.said: list[DeltaChainError | None] = []
        self.doubts: list[DeltaChainError | None] = []

    def run(self, *happens: Callable[[], object], turns: int = LOOK_BACK + 2) -> list[int]:
        """Let things happen, some turns apart; the versions that were applied."""
        self.said.clear()
        self.doubts.clear()
        self.clock.stop.clear()
        self.clock.happens = [one for each in happens for one in (each, *[nothing] * turns)]
        looks = self.subscriber.follow(stop=self.clock.stop, looked=self.looked)
        return [receipt.version for receipt in looks]

    def looked(self, exc: DeltaChainError | None) -> None:
        self.said.append(exc)
        self.doubts.append(self.subscriber.watch.doubt)


def nothing() -> None:
    pass


def rewrite(store: MemoryStore, seeds: range) -> None:
    """A restarted trainer goes on from what is there, with other bits."""
    model = TinyModel()
    with Publisher(PublishConfig(url=store.url), store=store).attach(model) as publisher:
        for seed in seeds:
            train_(model, 1000 + seed)
            publisher.publish()
            publisher.flush()
