"""What every kernel promises, as checks that need neither pytest nor any package but numpy."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from deltachain.kernels import host, staging, torch_kernels
from deltachain.kernels.arrays import Changes
from deltachain.kernels.device_diff import Compared, DeviceDiff
from deltachain.kernels.protocol import LiveBits, kernels_for, same_bits
from deltachain.kernels.torch_kernels import pin_
from deltachain.types import BITS_DTYPES, Bits, Indices, StateDigest
from tests.contract import reference


class DeviceArm:
    def __init__(self, where: str) -> None:
        self._where = torch.device(where)

    def digest(self, key: tuple[int, int], bits: Bits, start: int) -> StateDigest:
        return torch_kernels.digest(key, self.send(bits), start)

    def digest_at(self, key: tuple[int, int], indices: Indices, bits: Bits) -> StateDigest:
        return torch_kernels.digest_at(
            key, torch.from_numpy(indices).to(self._where), self.send(bits)
        )

    def gather(self, weights: Bits, indices: Indices) -> Bits:
        at = torch.from_numpy(indices).to(self._where)
        return _receive(torch_kernels.gather(self.send(weights), at), weights)

    def scatter_(self, weights: Bits, indices: Indices, bits: Bits) -> None:
        live = self.send(weights)
        torch_kernels.scatter_(live, torch.from_numpy(indices).to(self._where), self.send(bits))
        weights[:] = _receive(live, weights)

    def send(self, bits: Bits) -> Tensor:
        signed = bits if bits.itemsize == 1 else bits.view(f"<i{bits.itemsize}")
        return torch.from_numpy(signed.copy()).to(self._where)


class ProgramArm(DeviceArm):
    """Digests by the Triton program, which torch operations replace without Triton."""

    def digest(self, key: tuple[int, int], bits: Bits, start: int) -> StateDigest:
        return staging.digest(key, self.send(bits), start)

    def digest_at(self, key: tuple[int, int], indices: Indices, bits: Bits) -> StateDigest:
        at = torch.from_numpy(indices).to(self._where)
        return staging.digest(key, self.send(bits), indices=at)


class CrossingArm(DeviceArm):
    """``kernels.device_diff``, with the snapshot on the host or on the device."""

    def __init__(self, where: str, *, resident: bool = False) -> None:
        super().__init__(where)
        self._resident, self.diff = resident, DeviceDiff(self._where)

    def diff_(self, snapshot: Bits, current: Bits) -> Changes:
        weights = self.send(current)
        return self._diff(snapshot, weights, weights.dtype)

    def cast_diff_(self, snapshot: Bits, master: Any) -> Changes:
        weights = torch.from_numpy(master).to(self._where)
        return self._diff(snapshot, weights, torch.bfloat16)

    def _diff(self, snapshot: Bits, weights: Tensor, dtype: torch.dtype) -> Changes:
        kept = self.send(snapshot) if self._resident else _pinned(snapshot, self._where)
        found: dict[str, Changes] = {}
        self.diff.add(Compared("w", kept, 0, weights, dtype, self._resident))
        self.diff.settle(found)
        if self._resident:
            snapshot[:] = _receive(kept, snapshot)
        empty = np.empty(0, snapshot.dtype)
        return found.get("w", Changes(np.empty(0, np.int64), empty, empty))


def _pinned(snapshot: Bits, where: torch.device) -> Tensor:
    signed = snapshot if snapshot.itemsize == 1 else snapshot.view(f"<i{snapshot.itemsize}")
    tensor = torch.from_numpy(signed)
    if where.type == "cuda":
        assert pin_(tensor)
    return tensor


def _receive(bits: Tensor, like: Bits) -> Bits:
    return bits.cpu().numpy().view(like.dtype)


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
            _equal_bits(kernels.flat(view), array[at].ravel())
            kernels.overwrite_(view, kernels.receive(array[at] ^ 1, live))
            array[at] ^= array.dtype.type(1)
            _equal_bits(flat, array)


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
        _equal_bits(one, array)


def check_bounds(live: LiveBits) -> None:
    kernels = kernels_for(live)
    for indices in (np.array([2, 3, 7, 7_000_000_000]), np.empty(0, np.int64)):
        there = kernels.receive(indices, live)
        for low, high in ((0, 2), (2, 3), (3, 8), (4, 7), (0, 1 << 40), (8, 8)):
            expected = np.searchsorted(indices, [low, high]).tolist()
            assert list(kernels.bounds(there, low, high)) == expected


BIT_CHECKS: "tuple[Callable[[LiveBits], None], ...]" = (
    check_receive,
    check_views,
    check_copy_and_equal,
    check_bounds,
)


def _bits() -> list[Any]:
    rng = np.random.default_rng(8)
    return [rng.integers(0, 256, 70, dtype) for dtype in BITS_DTYPES.values()]


def _equal_bits(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(host.receive(found, expected), expected)


KEY = (0x0123456789ABCDEF, 0xFEDCBA9876543210)


class DiffArm(Protocol):
    """The kernels of a diff, on numpy arrays."""

    def diff_(self, snapshot: Bits, current: Bits) -> Changes: ...

    def cast_diff_(self, snapshot: Bits, master: Any) -> Changes: ...


class LiveArm(Protocol):
    """The kernels of live bits, on numpy arrays."""

    def digest(self, key: tuple[int, int], bits: Bits, start: int) -> StateDigest: ...

    def digest_at(self, key: tuple[int, int], indices: Indices, bits: Bits) -> StateDigest: ...

    def gather(self, weights: Bits, indices: Indices) -> Bits: ...

    def scatter_(self, weights: Bits, indices: Indices, bits: Bits) -> None: ...


class Arm(DiffArm, LiveArm, Protocol):
    """The kernels of the host."""

    def decode_gaps(self, gaps: Bits) -> Indices: ...


def check_diff(arm: DiffArm) -> None:
    """Indices, old and new bits, and the snapshot afterwards."""
    for before, current in pairs():
        _same_diff(reference.diff_, arm.diff_, before, current)


def check_cast_diff(arm: DiffArm) -> None:
    """Round to nearest even, ties, overflow to infinity, denormals, infinities."""
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 1 << 32, 100_003, dtype=np.uint32)
    exponent = (bits >> np.uint32(23)) & np.uint32(255)
    bits[(exponent == 255) & ((bits & np.uint32(0x7FFFFF)) != 0)] = 0x7F800000  # no NaN
    bits[:6] = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0xFF800000, 0x00000001, 0x80000000]
    master = bits.view(np.float32)
    snapshot = reference.cast_bf16(master)
    snapshot[rng.random(snapshot.size) < 0.02] ^= np.uint16(3)
    _same_diff(reference.cast_diff_, arm.cast_diff_, snapshot, master)


def check_cast_nan(arm: DiffArm) -> None:
    """A NaN becomes quiet and keeps its sign and the top of its payload; -0.0 stays."""
    bits = [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFC12345, 0xFFFFFFFF, 0x80000000, 0, 0x7F800000]
    master = np.array(bits, np.uint32).view(np.float32)
    for before in (0, 0x8000, 0x7FC0):
        snapshot = np.full(len(bits), before, np.uint16)
        _same_diff(reference.cast_diff_, arm.cast_diff_, snapshot, master)


def _same_diff(right: Any, diff: Any, before: Bits, current: Any) -> None:
    snapshot, expected = before.copy(), before.copy()
    _equal(right(expected, current), diff(snapshot, current))
    _equal((expected,), (snapshot,))


def check_gaps(arm: Arm) -> None:
    rng = np.random.default_rng(6)
    for size, count in ((1, 1), (1 << 20, 1), (1 << 20, 12_000), (5_000, 5_000), (300_000, 3)):
        offsets = np.sort(rng.choice(size, count, replace=False)).astype(np.int64)
        offsets[-1] = size - 1
        for width in (1, 2):
            _equal((offsets,), (arm.decode_gaps(reference.encode_gaps(offsets, width)),))


def check_digest(arm: LiveArm) -> None:
    """Whole and in pieces, every width."""
    for snapshot, current in pairs():
        whole = reference.digest(KEY, current)
        half = current.size // 2
        pieces = arm.digest(KEY, current[:half], 0) + arm.digest(KEY, current[half:], half)
        assert pieces == whole == arm.digest(KEY, current, 0)
        changes = reference.diff_(snapshot.copy(), current)
        new = arm.digest_at(KEY, changes.indices, changes.new)
        old = arm.digest_at(KEY, changes.indices, changes.old)
        assert arm.digest(KEY, snapshot, 0) + new - old == whole


def check_apply(arm: LiveArm) -> None:
    """What a diff found, scattered, gives the new bits; scattered back, the old ones."""
    for snapshot, current in pairs():
        weights = snapshot.copy()
        changes = reference.diff_(snapshot.copy(), current)
        _equal((changes.old,), (arm.gather(weights, changes.indices),))
        arm.scatter_(weights, changes.indices, changes.new)
        _equal((current,), (weights,))
        arm.scatter_(weights, changes.indices, changes.old)
        _equal((snapshot,), (weights,))


DIFF_CHECKS: tuple[Callable[[DiffArm], None], ...] = (
    check_diff,
    check_cast_diff,
    check_cast_nan,
)
"""What the kernels of a diff promise."""

LIVE_CHECKS: tuple[Callable[[LiveArm], None], ...] = (check_digest, check_apply)
"""What kernels of live bits promise, on the host and on a device."""

CHECKS: tuple[Callable[[Arm], None], ...] = (*DIFF_CHECKS, check_gaps, *LIVE_CHECKS)
"""What kernels of the host promise."""


def pairs() -> Iterator[tuple[Bits, Bits]]:
    rng = np.random.default_rng(4)
    for dtype in BITS_DTYPES.values():
        for size in (0, 1, 7, 1023, 1024, 1025, 4095, 4096, 4097, 70_001):
            for density in (0.0, 0.012, 1.0):
                current = rng.integers(0, 256, size, dtype)
                changed = rng.random(size) < density
                snapshot = current.copy()
                snapshot[changed] ^= np.array(1 << (8 * dtype.itemsize - 1), dtype)
                yield snapshot, current


def _equal(expected: tuple[Any, ...], found: tuple[Any, ...]) -> None:
    for one, other in zip(expected, found, strict=True):
        assert one.dtype == other.dtype, (one.dtype, other.dtype)
        np.testing.assert_array_equal(one, other)
