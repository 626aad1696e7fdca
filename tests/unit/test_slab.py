"""Arrays share pieces of memory, never the same bytes, and pieces do not outlive them."""

from __future__ import annotations

import numpy as np
import pytest

from deltachain import threads as slab


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64])
@pytest.mark.parametrize("count", [0, 1, 3, 50_000, 1 << 20, slab.NBYTES])
def test_an_array_has_the_size_that_was_asked_for(count: int, dtype: type) -> None:
    found = slab.empty(count, dtype)
    assert (found.shape, found.dtype) == ((count,), dtype)
    assert found.flags.writeable
    assert found.flags.aligned


def test_arrays_in_use_are_never_written_by_others() -> None:
    rng = np.random.default_rng(0)
    kept: dict[int, np.ndarray] = {}
    for number in range(600):
        found = slab.empty(int(rng.integers(1, 1 << 20)), np.uint16)
        found[:] = number
        kept[number] = found[found.size // 3 :]  # a view keeps its memory too
        del found
        if len(kept) > 5:
            gone = int(rng.choice(list(kept)))
            assert (kept.pop(gone) == gone).all()
    assert all((array == number).all() for number, array in kept.items())


def test_memory_that_nobody_uses_is_used_again() -> None:
    one = slab.empty(100_000, np.uint16)
    at = one.ctypes.data
    assert slab.empty(100_000, np.uint16).ctypes.data != at
    del one
    assert slab.empty(100_000, np.uint16).ctypes.data == at
