"""Promises of :class:`BitKernels` for host and device, as checks that need numpy and torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from deltachain.kernels import host
from deltachain.kernels.protocol import LiveBits, kernels_for, same_bits
from deltachain.types import BITS_DTYPES


def check_receive(live: LiveBits) -> None:
    receive = kernels_for(live).receive
    for array in (*_bits(), np.arange(7), np.arange(7) % 2 == 0):
        frozen = array.copy()
        frozen.flags.writeable = False
        for sent in (array, frozen, array[::3], array[:0]):
            there: Any = receive(sent, live)
            assert receive(there, live) is there
            assert type(there) is type(live)
            assert there.shape == sent.shape
            back = host.receive(there, np.empty(0, sent.dtype))
            assert back.dtype == sent.dtype
            np.testing.assert_array_equal(back, sent)


def check_views(live: LiveBits) -> None:
    kernels = kernels_for(live)
    for array in _bits():
        flat: Any = kernels.copy(kernels.receive(array, live))
        for offset, shape, stride in (
            (0, [7, 10], [10, 1]),
            (3, [4, 2], [9, 5]),
            (69, [1], [1]),
            (5, [0, 3], [3, 1]),
        ):
            view: Any = kernels.strided(flat, offset, shape, stride)
            at = offset + sum(
                np.arange(n).reshape([-1 if i == axis else 1 for i in range(len(shape))]) * step
                for axis, (n, step) in enumerate(zip(shape, stride, strict=True))
            )
            _equal(kernels.flat(view), array[at].ravel())
            kernels.overwrite_(view, kernels.receive(array[at] ^ 1, live))
            array[at] ^= array.dtype.type(1)
            _equal(flat, array)


def check_copy_and_equal(live: LiveBits) -> None:
    kernels = kernels_for(live)
    for array in _bits():
        one: Any = kernels.copy(kernels.receive(array, live))
        other: Any = kernels.copy(one)
        assert kernels.address(one) != kernels.address(other)
        assert kernels.address(one) == kernels.address(one[:5])
        assert same_bits(one, other)
        other[69] ^= 1
        assert not same_bits(one, other)
        _equal(one, array)


def check_bounds(live: LiveBits) -> None:
    kernels = kernels_for(live)
    for indices in (np.array([2, 3, 7, 7_000_000_000]), np.empty(0, np.int64)):
        there = kernels.receive(indices, live)
        for low, high in ((0, 2), (2, 3), (3, 8), (4, 7), (0, 1 << 40), (8, 8)):
            expected = np.searchsorted(indices, [low, high]).tolist()
            assert list(kernels.bounds(there, low, high)) == expected


BIT_CHECKS: tuple[Callable[[LiveBits], None], ...] = (
    check_receive,
    check_views,
    check_copy_and_equal,
    check_bounds,
)


def _bits() -> list[Any]:
    rng = np.random.default_rng(8)
    return [rng.integers(0, 256, 70, dtype) for dtype in BITS_DTYPES.values()]


def _equal(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(host.receive(found, expected), expected)
