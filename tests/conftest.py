from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from deltachain.testing.seaweed import Seaweed

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def seaweed_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    # Not at the top: machines with a GPU run other tests, and have no boto3.
    from deltachain.testing.seaweed import Seaweed  # noqa: PLC0415

    with Seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def seaweed(seaweed_of_session: Seaweed) -> Seaweed:
    """An S3 server that runs, whatever the test before did to it."""
    if not seaweed_of_session.pid:
        seaweed_of_session.restart()
    return seaweed_of_session


@pytest.fixture
def s3_url(seaweed: Seaweed) -> Callable[[], str]:
    """Makes URLs of empty stores on that server."""
    return lambda: seaweed.url(f"test/{next(_NUMBERS)}")
