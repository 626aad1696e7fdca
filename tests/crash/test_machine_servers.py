"""The state machine against real servers: shorter runs, the same demands."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from deltachain.store import open_store
from tests.crash.places import Place
from tests.crash.test_machine import Machine


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3", "hf"], indirect=True)
def test_anything_in_any_order_on_a_server(place: Place) -> None:
    numbers = itertools.count()

    class ServerMachine(Machine):
        fresh = staticmethod(lambda: open_store(place.url(str(next(numbers)))))

    chosen = settings(
        max_examples=16,
        stateful_step_count=15,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(ServerMachine, settings=chosen)
