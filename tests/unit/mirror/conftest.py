from __future__ import annotations

from collections.abc import Callable

import pytest

from deltachain.format.keys import PUBLISHER_KEY
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore, Store
from tests.support.models import TinyModel, train_

Grow = Callable[..., None]


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
def mirror_store() -> MemoryStore:
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
