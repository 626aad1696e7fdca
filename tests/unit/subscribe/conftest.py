from collections.abc import Iterator
from pathlib import Path

import pytest

from deltachain.store import MemoryStore
from deltachain.subscribe import Subscriber
from tests.support.models import Replica, replica_of
from tests.unit.subscribe.accidents import Run, Told
from tests.unit.subscribe.clock import Clock


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def run(store: MemoryStore, tmp_path: Path) -> Iterator[Run]:
    made = Run(store, tmp_path / "mirror")
    yield made
    made.close()


@pytest.fixture(params=["dict", "module", "folder"])
def replica(request: pytest.FixtureRequest, run: Run) -> Replica:
    """One of each kind of target, holding nothing."""
    return replica_of(run.model, request.param, run.mirror)


@pytest.fixture
def subscriber(run: Run) -> Subscriber:
    """A folder that holds version 1 of 2."""
    run.publish(1)
    subscriber = run.join(run.mirror)
    run.publish(2)
    return subscriber


@pytest.fixture
def clock(subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(subscriber, monkeypatch)


@pytest.fixture
def told(subscriber: Subscriber, clock: Clock) -> Told:
    return Told(subscriber, clock)
