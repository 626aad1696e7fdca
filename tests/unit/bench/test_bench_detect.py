from functools import partial

import numpy as np
import pytest

from deltachain.kernels import reference
from deltachain.kernels.reference import Changes
from deltachain.types import Bits
from tests.bench import quantised_diff
from tests.bench.detect import Data

NUMEL = 1 << 14


@pytest.fixture
def data() -> Data:
    return Data.generate(NUMEL, 0.02)


def test_check_refuses_a_kernel_that_misses_one(data: Data) -> None:
    def careless(snapshot: Bits, current: Bits) -> Changes:
        indices, old, new = reference.diff_(snapshot, current)
        return Changes(indices[:-1], old[:-1], new[:-1])

    with pytest.raises(ArithmeticError, match="careless"):
        data.check("careless", partial(careless, data.snapshot, data.current))


def test_check_refuses_a_kernel_that_leaves_the_snapshot_behind(data: Data) -> None:
    def forgetful(snapshot: Bits, current: Bits) -> Changes:
        return reference.diff_(snapshot.copy(), current)

    with pytest.raises(ArithmeticError, match="forgetful"):
        data.check("forgetful", partial(forgetful, data.snapshot, data.current))


def test_codes_that_are_missed_are_an_error() -> None:
    pytest.importorskip("numba")
    rng = np.random.default_rng(1)
    coded = quantised_diff.Coded.of("fp8-block", rng.standard_normal(NUMEL, np.float32))
    for dtype in quantised_diff.FLOORS:
        coded.check("passes", partial(coded.find_in_passes, dtype))
        coded.check("one pass", partial(coded.find, dtype))

    def careless() -> Changes:
        indices, old, new = coded.find("bf16")
        return Changes(indices[1:], old[1:], new[1:])

    with pytest.raises(ArithmeticError, match="careless"):
        coded.check("careless", careless)
