from functools import partial

import pytest

from deltachain.kernels import reference
from deltachain.kernels.reference import Changes
from deltachain.types import Bits
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
