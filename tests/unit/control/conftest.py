from collections.abc import Iterator
from pathlib import Path

import pytest

from deltachain.replica.leader import Leader
from tests.unit.control.replicas import followed, leader_of
from tests.unit.replica.replicas import Followed


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Followed]:
    """An engine of two ranks that holds version 0 of 2."""
    yield from followed(tmp_path)


@pytest.fixture
def leader(here: Followed) -> Iterator[Leader]:
    yield from leader_of(here)
