from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from deltachain.format.keys import MIRROR_KEY, PUBLISHER_KEY
from deltachain.mirror import Mirror, MirrorReceipt
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore, Store
from deltachain.subscribe import Subscriber
from tests.support.models import TinyModel, bits_of, same, tensors_of, train_

Grow = Callable[..., None]


@dataclass(frozen=True)
class Pair:
    """A store that versions are published into, and one of a mirror."""

    source: MemoryStore
    there: MemoryStore
    grow: Grow
    model: TinyModel

    def mirror(self, **settings: Any) -> Mirror:
        return Mirror(self.source, self.there, **settings)

    def copy(self, **settings: Any) -> list[MirrorReceipt]:
        return list(self.mirror(**settings).catch_up())

    def copied(self) -> dict[str, bytes]:
        """Every object of the mirror but its own record."""
        found = copy_of(self.there)
        found.pop(MIRROR_KEY, None)
        return found

    def check(self) -> None:
        """Check that the mirror has the objects of its source, and its own record."""
        assert self.there.find(MIRROR_KEY)
        assert self.copied() == copy_of(self.source)

    def check_newcomer(self, store: Store | None = None) -> None:
        """Check that who begins at the mirror gets the bits of the model."""
        tensors = tensors_of(self.model)
        Subscriber("memory://unused", tensors, store=store or self.there).update()
        assert same(bits_of(tensors), bits_of(self.model))


def copy_of(store: Store) -> dict[str, bytes]:
    """Every object of a store that a mirror copies: its publisher is at work in one store only."""
    return {info.key: store.get(info.key) for info in store.list() if info.key != PUBLISHER_KEY}


@pytest.fixture
def model() -> TinyModel:
    return TinyModel()


@pytest.fixture
def source() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def grow(source: MemoryStore, model: TinyModel) -> Grow:
    """Publishes versions into the source, with an anchor behind each that ``every`` divides."""
    steps = iter(range(1, 10_000))

    def run(count: int, *, every: int = 4, to: Store | None = None) -> None:
        store = to or source
        config = PublishConfig(url=store.url, anchor_every=every, part_nbytes=256)
        with Publisher(config, store=store).attach(
            model, assets={"config.json": b"{}"}
        ) as publisher:
            for _ in range(count):
                step = next(steps)
                train_(model, step)
                publisher.publish(step=step)
                publisher.flush()

    return run


@pytest.fixture
def pair(source: MemoryStore, grow: Grow, model: TinyModel) -> Pair:
    return Pair(source, MemoryStore(), grow, model)
