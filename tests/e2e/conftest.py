"""One browser for the tests of a module: while one is open, no other event loop can be run."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.pages import CHROMIUM, chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not CHROMIUM:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with chromium() as started:
        yield started
