"""What is divided among threads gives the bits of one."""

from __future__ import annotations

import os

import numpy as np
import pytest

from deltachain.kernels import reference, threaded
from deltachain.types import BITS_DTYPES


@pytest.mark.parametrize("cores", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [0, 1, threaded.LEAST, 2 * threaded.LEAST, 3 * threaded.LEAST + 5])
def test_copies_and_digests_are_those_of_one_thread(
    size: int, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    rng = np.random.default_rng(size)
    for dtype in (BITS_DTYPES[1], BITS_DTYPES[2]):
        bits = rng.integers(0, 256, size, dtype)
        copied = threaded.copy(bits)
        np.testing.assert_array_equal(copied, bits)
        assert copied.dtype == bits.dtype
        assert not np.shares_memory(copied, bits)
        key = (3, 1 << 63)
        assert threaded.digest(key, bits, 77) == reference.digest(key, bits, 77)
