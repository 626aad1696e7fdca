"""Every implementation of the kernels keeps the contract, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from deltachain.delta import TensorDelta
from deltachain.kernels import device, host, jit, reference
from deltachain.kernels.protocol import (
    LiveBits,
    digest_change,
    kernels_for,
    move,
    move_at,
    same_bits,
    write_,
)
from deltachain.types import BITS_DTYPES, TensorSpec
from tests.contract.host import HOST_CHECKS, HostArm
from tests.contract.kernels import BIT_CHECKS, CHECKS, LIVE_CHECKS, Arm, DeviceArm, pairs


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_kernels_in_numba_keep_the_contract(check: Callable[[Arm], None]) -> None:
    kernels: Any = jit
    check(kernels)


@pytest.mark.parametrize("check", LIVE_CHECKS, ids=lambda check: check.__name__)
def test_torch_operations_keep_the_contract(check: Callable[[Any], None]) -> None:
    check(DeviceArm("cpu"))


@pytest.mark.parametrize("check", HOST_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kernels", [reference, jit])
def test_kernels_of_the_host_keep_the_contract(
    kernels: Any, check: Callable[[HostArm], None]
) -> None:
    check(kernels)


LIVE: dict[str, LiveBits] = {
    "host": np.empty(0, np.uint16),
    "device": torch.empty(0, dtype=torch.int16),
}


@pytest.mark.parametrize("check", BIT_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("where", LIVE)
def test_kernels_of_live_bits_do_what_numpy_does(
    where: str, check: Callable[[LiveBits], None]
) -> None:
    check(LIVE[where])


def test_live_bits_choose_the_fastest_kernels() -> None:
    chosen: list[Any] = [kernels_for(bits) for bits in LIVE.values()]
    assert chosen == [host, device]
    assert not same_bits(LIVE["host"], LIVE["device"])
    assert str(host.NAME) == "numba"
    assert host.diff_ is jit.diff_


@pytest.mark.parametrize("name", ["BLOCK", "CHUNK", "mix_", "__wrapped__"])
def test_the_host_offers_kernels_of_the_reference_alone(name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(host, name)


@pytest.mark.parametrize("kind", ["step", "absolute", "mixed"])
@pytest.mark.parametrize("where", LIVE)
def test_a_move_is_what_the_delta_and_the_reference_say(where: str, kind: str) -> None:
    live, key, rng = LIVE[where], (3, 5), np.random.default_rng(9)
    kernels = kernels_for(live)
    for dtype in BITS_DTYPES.values():
        bits, values = rng.integers(0, 256, 90, dtype), rng.integers(1, 256, 20, dtype)
        indices = np.sort(rng.choice(90, 20, replace=False)) + 1000
        masks = {"step": np.array(False), "absolute": np.array(True), "mixed": values % 2 == 0}
        mask = masks[kind]
        old = bits[indices - 1000]
        new = np.where(mask, values, old + values)
        weights = kernels.copy(kernels.receive(bits, live))
        at, given, positions = (
            kernels.receive(array, live) for array in (indices, values, indices - 1000)
        )
        absolute = kernels.receive(mask, live) if mask.ndim else mask
        moved = move_at(weights, positions, key, at, given, absolute)
        assert moved.added == reference.digest_at(key, indices, new)
        assert moved.removed == reference.digest_at(key, indices, old)
        write_(weights, positions, moved.new)
        bits[indices - 1000] = new
        np.testing.assert_array_equal(host.receive(weights, bits), bits)
        write_(weights, positions, moved.old)
        bits[indices - 1000] = old
        np.testing.assert_array_equal(host.receive(weights, bits), bits)


def test_a_move_of_a_whole_tensor_changes_the_digest_by_what_it_says() -> None:
    spec = TensorSpec("w", "BF16", (9,))
    old, indices = np.arange(9, dtype=np.uint16), np.array([2, 5])
    steps = np.array([7, 65535], np.uint16)
    moved = move(old, TensorDelta(spec=spec, indices=indices, values=steps))
    assert moved.change == digest_change(spec, indices, old[indices], old[indices] + steps)
    whole = move(old, TensorDelta.dense(spec, old + steps[0]))
    assert (whole.new == old + steps[0]).all()
    assert whole.change == whole.added, "what it replaces need not be known"


def test_encoders_equal_the_reference() -> None:
    for snapshot, current in pairs():
        indices = np.flatnonzero(snapshot != current)
        for width in (1, 2):
            expected = reference.encode_gaps(indices, width)
            np.testing.assert_array_equal(expected, jit.encode_gaps(indices, width))
        steps = (current - snapshot)[indices]
        for one, other in zip(reference.split_steps(steps), jit.split_steps(steps), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(reference.join_steps(jit.split_steps(steps)), steps)


def test_cast_keeps_nans_quiet_and_signed() -> None:
    masters = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFC12345], np.uint32)
    expected = np.array([0x7FC0, 0xFFC0, 0x7FFF, 0xFFC1], np.uint16)
    np.testing.assert_array_equal(jit.cast_bf16(masters.view(np.float32)), expected)
    np.testing.assert_array_equal(reference.cast_bf16(masters.view(np.float32)), expected)
