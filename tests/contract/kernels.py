"""What every kernel promises, as checks that need neither pytest nor any package but numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from deltachain.kernels import reference
from deltachain.kernels.reference import Changes
from deltachain.types import BITS_DTYPES, Bits, Indices, StateDigest

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
        snapshot, expected_snapshot = before.copy(), before.copy()
        expected = reference.diff_(expected_snapshot, current)
        _equal(expected, arm.diff_(snapshot, current))
        _equal((expected_snapshot,), (snapshot,))


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
    expected_snapshot = snapshot.copy()
    expected = reference.cast_diff_(expected_snapshot, master)
    _equal(expected, arm.cast_diff_(snapshot, master))
    _equal((expected_snapshot,), (snapshot,))


def check_cast_nan(arm: DiffArm) -> None:
    """A NaN becomes quiet and keeps its sign and the top of its payload; -0.0 stays."""
    bits = [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFC12345, 0xFFFFFFFF, 0x80000000, 0, 0x7F800000]
    master = np.array(bits, np.uint32).view(np.float32)
    for before in (0, 0x8000, 0x7FC0):
        snapshot = np.full(len(bits), before, np.uint16)
        expected_snapshot = snapshot.copy()
        expected = reference.cast_diff_(expected_snapshot, master)
        _equal(expected, arm.cast_diff_(snapshot, master))
        _equal((expected_snapshot,), (snapshot,))


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
