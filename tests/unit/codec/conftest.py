"""Deltas of every shape, for all tests of the codec."""

from collections.abc import Callable

import numpy as np
import pytest

from deltachain.codec import Change
from deltachain.delta import ABSOLUTE, STEP, TensorDelta
from deltachain.types import BITS_DTYPES, StateDigest, TensorSpec

Make = Callable[..., Change]


@pytest.fixture
def make() -> Make:
    """Make a change of a tensor from indices and values; dense when there are no indices."""

    def change(
        name: str,
        values: list[int],
        indices: list[int] | None = None,
        *,
        width: int = 2,
        numel: int | None = None,
        absolute: bool = False,
    ) -> Change:
        dtype = {1: "U8", 2: "BF16", 4: "F32", 8: "I64"}[width]
        spec = TensorSpec(name, dtype, (len(values) if numel is None else numel,))
        bits = np.array(values, BITS_DTYPES[width])
        if indices is None:
            return Change(TensorDelta.dense(spec, bits), StateDigest(1, 2))
        delta = TensorDelta(
            spec=spec,
            indices=np.array(indices, np.int64),
            values=bits,
            absolute=ABSOLUTE if absolute else STEP,
        )
        return Change(delta, StateDigest(3, 4))

    return change
