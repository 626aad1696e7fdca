"""The checks of ``make test-gpu`` under pytest: ``pytest -m gpu`` on a machine with a CUDA card."""

from collections.abc import Callable

import pytest

from tests.gpu.ranks import checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("check", [pytest.param(check, id=name) for name, check in checks("cuda")])
def test_a_rank_on_a_device(check: Callable[[], None]) -> None:
    check()
