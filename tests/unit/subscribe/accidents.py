"""Stores that things happen to while somebody follows."""

from collections.abc import Callable
from typing import TypeAlias

from deltachain.errors import DeltaChainError
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore
from deltachain.subscribe import Subscriber
from deltachain.subscribe.subscriber import LOOK_BACK
from tests.support.models import TinyModel, train_
from tests.unit.subscribe.clock import Clock

Copy: TypeAlias = dict[str, bytes]


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


def copy(store: MemoryStore) -> Copy:
    return {info.key: store.get(info.key) for info in store.list()}


def restore(store: MemoryStore, earlier: Copy) -> None:
    """Put a store back to an earlier copy of itself."""
    for info in list(store.list()):
        if info.key not in earlier:
            store.delete(info.key)
    for key, data in earlier.items():
        store.put(key, data)


def rewrite(store: MemoryStore, seeds: range) -> None:
    """A restarted trainer goes on from what is there, with other bits."""
    model = TinyModel()
    with Publisher(PublishConfig(url=store.url), store=store).attach(model) as publisher:
        for seed in seeds:
            train_(model, 1000 + seed)
            publisher.publish()
            publisher.flush()
