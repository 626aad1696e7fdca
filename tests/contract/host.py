"""What the kernels that only the host has promise, as checks against the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from deltachain.types import Bits, Indices
from tests.contract.kernels import pairs


class HostArm(Protocol):
    """Kernels in numpy or numba that decode parts and write into host memory."""

    def join_planes(self, planes: Sequence[Any], out: Bits) -> None: ...

    def exchange_(self, one: Bits, other: Bits, done: Indices, end: int) -> None: ...


def check_planes(arm: HostArm) -> None:
    """Byte planes of every width, joined, into a part of an array."""
    for _, bits in pairs():
        planes = [bits.view(np.uint8)[k :: bits.itemsize].copy() for k in range(bits.itemsize)]
        whole = np.full(bits.size + 2, 77, bits.dtype)
        arm.join_planes(planes, whole[1:-1])
        np.testing.assert_array_equal(whole[1:-1], bits)
        assert whole[0] == whole[-1] == 77


def check_exchange(arm: HostArm) -> None:
    """All elements, some and none, forward and back."""
    for before, after in pairs():
        one, other, done = before.copy(), after.copy(), np.zeros(1, np.int64)
        for end in (after.size // 3, after.size, after.size, after.size // 2, 0):
            arm.exchange_(one, other, done, end)
            assert done[0] == end
            for found, first, rest in ((one, after, before), (other, before, after)):
                np.testing.assert_array_equal(found[:end], first[:end])
                np.testing.assert_array_equal(found[end:], rest[end:])


HOST_CHECKS: tuple[Callable[[HostArm], None], ...] = (check_planes, check_exchange)
