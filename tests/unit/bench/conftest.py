"""One chain of the default size, simulated once for all tests that measure it."""

from collections.abc import Mapping

import pytest

from tests.bench.chains import SMALL, Step, SyntheticChain, TensorChange, changes_of

DENSITY = 0.012
"""Where the measurements compared with were taken: 1.0 to 1.25 %."""


@pytest.fixture(scope="session")
def steps() -> list[Step]:
    return list(SyntheticChain(seed=11).with_density(DENSITY).steps(3))


@pytest.fixture(scope="session")
def changes(steps: list[Step]) -> Mapping[str, TensorChange]:
    return changes_of(steps[-1], SMALL.specs())
