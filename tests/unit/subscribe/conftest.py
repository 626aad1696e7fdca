from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from deltachain.errors import DeltaChainError
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore, Store
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.support.faults import FaultyStore
from tests.support.models import Replica, TinyModel, replica_of, tensors_of, train_
from tests.unit.subscribe.accidents import Told
from tests.unit.subscribe.clock import Clock


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def model() -> TinyModel:
    return TinyModel()


@pytest.fixture
def publisher(store: MemoryStore, model: TinyModel) -> Iterator[Publisher]:
    """Attached to the model; version 0 is committed. Anchors are added by nobody."""
    config = PublishConfig(url=store.url, anchor_factor=1e6)
    publisher = Publisher(config, store=store).attach(model)
    yield publisher
    with suppress(DeltaChainError):
        publisher.close()


@pytest.fixture
def publish(publisher: Publisher, model: TinyModel) -> Callable[..., None]:
    """Train and publish: one version for each seed."""

    def run(*seeds: int, share: float = 0.02) -> None:
        for seed in seeds:
            train_(model, seed, share=share)
            publisher.publish(step=seed)
            publisher.flush()

    return run


@pytest.fixture(params=["dict", "module", "folder"])
def replica(request: pytest.FixtureRequest, model: TinyModel, tmp_path: Path) -> Replica:
    """One of each kind of target, holding nothing."""
    return replica_of(model, request.param, tmp_path / "mirror")


@pytest.fixture
def subscribe(store: MemoryStore) -> Callable[..., Subscriber]:
    def build(target: Any, on: Store | None = None, **settings: Any) -> Subscriber:
        settings.setdefault("poll_s", 0.001)
        config = SubscribeConfig(url=store.url, **settings)
        return Subscriber(config, getattr(target, "target", target), store=on or store)

    return build


@pytest.fixture
def add_anchor(publisher: Publisher) -> Callable[[], None]:
    """Put an anchor behind the newest version."""

    def run() -> None:
        session = publisher._session
        assert session is not None
        assert session.add_anchor(session.begin_anchor(), topic="").kind == "anchor"

    return run


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


@pytest.fixture
def subscriber(
    mirror: Path, subscribe: Callable[..., Subscriber], publish: Callable[..., None]
) -> Subscriber:
    """Holds version 1 of 2."""
    publish(1)
    subscriber = subscribe(mirror)
    subscriber.update()
    publish(2)
    return subscriber


@pytest.fixture
def zeros(model: TinyModel) -> dict[str, Tensor]:
    """A target in memory that holds nothing."""
    return tensors_of(model)


@pytest.fixture
def faulty(store: MemoryStore) -> FaultyStore:
    return FaultyStore(store)


@pytest.fixture
def clock(subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(subscriber, monkeypatch)


@pytest.fixture
def told(subscriber: Subscriber, clock: Clock) -> Told:
    return Told(subscriber, clock)
