"""Experts that vLLM's own balancer moves: written where they are, or the swap is refused."""

import pytest

from tests.engines.moving import EXPERTS, examine
from tests.engines.two_ranks import two_ranks

pytestmark = pytest.mark.engine


def test_experts_that_move_are_found_two_hundred_times() -> None:
    found = examine(0, 1, 200)
    assert (found["wrong"], found["another state"], found["differs"]) == (0, 0, [[]])
    assert found["refused"] >= 100


def test_experts_that_move_between_ranks() -> None:
    found, _ = two_ranks("tests.engines.moving:examine", 2, 40, deadline_s=900)
    assert (found["wrong"], found["another state"], found["differs"]) == (0, 0, [[], []])
    assert found["refused"] >= EXPERTS
