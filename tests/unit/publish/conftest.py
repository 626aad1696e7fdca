import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from deltachain.errors import DeltaChainError
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore, Store
from tests.support.faults import Fault
from tests.support.models import plain_model
from tests.unit.publish.chains import Attach, Begin, Quantised, Run


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def attach(store: MemoryStore) -> Iterator[Callable[..., Publisher]]:
    """Attach publishers that are closed when the test is over, failed or not."""
    made: list[Publisher] = []

    def build(model: nn.Module, on: Store | None = None, **settings: Any) -> Publisher:
        config = PublishConfig(url=store.url, **settings)
        made.append(Publisher(config, store=on or store))
        return made[-1].attach(model)

    yield build
    for publisher in made:
        with suppress(DeltaChainError):
            publisher.close()


@pytest.fixture
def new_threads() -> Callable[[str], list[threading.Thread]]:
    """Return the threads of a name that the test started: others' publishers may be open."""
    before = set(threading.enumerate())

    def named(name: str) -> list[threading.Thread]:
        return [t for t in set(threading.enumerate()) - before if t.name.startswith(name)]

    return named


@pytest.fixture
def begin(attach: Attach, store: MemoryStore) -> Begin:
    """Begin to publish a model; to the same store, as often as a test likes."""

    def build(model: nn.Module | None = None, *faults: Fault, **settings: Any) -> Run:
        return Run(attach, store, model or plain_model(), *faults, **settings)

    return build


@pytest.fixture
def chain(tmp_path: Path) -> Quantised:
    return Quantised(tmp_path)
