"""Experts that SGLang's own balancer moves: written where they are, or the swap is refused."""

import pytest

from tests.engines.two_ranks import two_ranks

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("ranks", "times"), [(1, 200), (2, 40)])
def test_experts_that_move_are_found(ranks: int, times: int) -> None:
    """In processes of their own: SGLang keeps the settings with which it starts."""
    examine = "tests.engines.moving:examine"
    found, *_ = two_ranks(examine, ranks, times, deadline_s=3600, ranks=ranks)
    assert (found["wrong"], found["another state"], found["differs"]) == (0, 0, [[]] * ranks)
    assert found["refused"] >= times // 2
