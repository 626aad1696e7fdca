from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Sharding
from tests.unit.replica.replicas import Followed


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[Callable[..., Followed]]:
    """Makes engines that hold version 0 of a chain, and a subscriber to each."""
    made: list[Followed] = []

    def build(shape: Sharding | None = None, **settings: Any) -> Followed:
        made.append(Followed(shape or Sharding(tp=2), tmp_path / str(len(made)), **settings))
        return made[-1]

    yield build
    for one in made:
        one.close()


@pytest.fixture
def here(followed: Callable[..., Followed]) -> Followed:
    """Two ranks that hold version 1 of 2, led by the subscriber."""
    made = followed()
    made.publish(1)
    made.subscriber.update()
    made.publish(2)
    made.engine.events.clear()
    return made
