"""Every implementation of the kernels keeps the contract, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deltachain.kernels import host, jit, reference, twolevel
from deltachain.types import BITS_DTYPES
from tests.contract.arms import CrossingArm, DeviceArm
from tests.contract.kernels import CHECKS, Arm, pairs

ARMS: dict[str, Any] = {
    "jit": jit,
    "twolevel": twolevel,
    "device": DeviceArm("cpu"),
    "crossing": CrossingArm("cpu"),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ARMS)
def test_implementation_keeps_the_contract(name: str, check: Callable[[Arm], None]) -> None:
    check(ARMS[name])


@pytest.mark.parametrize("kernels", [jit, twolevel])
def test_encoders_equal_the_reference(kernels: Any) -> None:
    for snapshot, current in pairs():
        indices = np.flatnonzero(snapshot != current)
        for width in (1, 2):
            expected = reference.encode_gaps(indices, width)
            np.testing.assert_array_equal(expected, kernels.encode_gaps(indices, width))
        steps = (current - snapshot)[indices]
        for one, other in zip(
            reference.split_steps(steps), kernels.split_steps(steps), strict=True
        ):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kernels", [jit, twolevel])
def test_cast_keeps_nans_quiet_and_signed(kernels: Any) -> None:
    masters = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFC12345], np.uint32)
    expected = np.array([0x7FC0, 0xFFC0, 0x7FFF, 0xFFC1], np.uint16)
    np.testing.assert_array_equal(kernels.cast_bf16(masters.view(np.float32)), expected)
    np.testing.assert_array_equal(reference.cast_bf16(masters.view(np.float32)), expected)


@pytest.mark.parametrize("dtype", BITS_DTYPES.values(), ids=str)
def test_a_chunked_device_diff_counts_indices_through(
    dtype: np.dtype[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltachain.kernels.device.CHUNK", 100)
    monkeypatch.setattr("deltachain.kernels.crossing.CHUNK", 64)
    rng = np.random.default_rng(0)
    current = rng.integers(0, 200, 1_000, dtype)
    for arm in (DeviceArm("cpu"), CrossingArm("cpu")):
        snapshot = np.where(rng.random(1_000) < 0.1, current + dtype.type(1), current)
        expected = reference.diff_(snapshot.copy(), current)
        for one, other in zip(expected, arm.diff_(snapshot, current), strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(snapshot, current)


def test_the_host_kernels_are_the_fastest_that_are_installed() -> None:
    assert str(host.NAME) == "numba"
    assert host.diff_ is jit.diff_
