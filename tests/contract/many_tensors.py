"""What a diff of many tensors on a device promises, in Triton.

Needs numpy and torch alone, so that it runs on a bare card as well.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from deltachain.kernels import host
from deltachain.kernels.arrays import Changes
from deltachain.kernels.device_diff import ALIGNMENT, Compared, CopyStream, DeviceDiff
from deltachain.kernels.torch_kernels import INT_DTYPES
from deltachain.types import BITS_DTYPES
from tests.contract import reference

SIZES = (1, 0, 5000, 4096, 17, 40_000, 8192, 3)


class Weights:
    """Tensors of one kind, and their snapshot in one flat slab."""

    def __init__(
        self,
        where: str,
        sizes: tuple[int, ...] = SIZES,
        *,
        width: int = 2,
        resident: bool,
        master: bool = False,
        density: float = 0.01,
    ) -> None:
        rng = np.random.default_rng(3)
        unit = ALIGNMENT // width
        self.starts = np.cumsum([0, *(-(-size // unit) * unit for size in sizes)]).tolist()
        self.sizes, self.resident, self.master = sizes, resident, master
        self.dtype = torch.bfloat16 if master else INT_DTYPES[width]
        self.host = rng.integers(0, 256, self.starts[-1], BITS_DTYPES[width])
        if master:
            values = rng.standard_normal(self.starts[-1]).astype(np.float32)
            self.live = torch.from_numpy(values).to(where)
            self.host = reference.cast_bf16(values)
        else:
            self.live = self._signed(self.host.copy()).to(where)
        changed = rng.random(self.starts[-1]) < density
        before = np.where(changed, self.host ^ self.host.dtype.type(1), self.host)
        self.kept = self._signed(before.copy()).to(where if resident else "cpu")
        self.before = before

    def _signed(self, bits: Any) -> Tensor:
        return torch.from_numpy(bits if bits.itemsize == 1 else bits.view(f"<i{bits.itemsize}"))

    def slab_before(self) -> Tensor:
        return self._signed(self.before.copy())

    def add_to(self, diff: DeviceDiff) -> None:
        for number, (start, size) in enumerate(zip(self.starts, self.sizes, strict=False)):
            live = self.live[start : start + size]
            name = f"w{number}"
            diff.add(Compared(name, self.kept, start, live, self.dtype, self.resident))

    def expected(self) -> dict[str, Changes]:
        found = {}
        for number, (start, size) in enumerate(zip(self.starts, self.sizes, strict=False)):
            one = slice(start, start + size)
            changes = reference.diff_(self.before[one].copy(), self.host[one])
            if changes.indices.size:
                found[f"w{number}"] = changes
        return found

    def check(self, found: dict[str, Changes]) -> None:
        expected = self.expected()
        assert found.keys() == expected.keys()
        for name, changes in expected.items():
            for one, other in zip(changes, found[name], strict=True):
                assert one.dtype == other.dtype
                np.testing.assert_array_equal(one, other)
        after = self.kept.cpu().numpy().view(self.host.dtype)
        for start, size in zip(self.starts, self.sizes, strict=False):
            mine = slice(start, start + size)
            np.testing.assert_array_equal(after[mine], self.host[mine])


def settle(diff: DeviceDiff) -> dict[str, Changes]:
    found: dict[str, Changes] = {}
    diff.settle(found)
    return found


@contextmanager
def counted(name: str) -> Iterator[list[Any]]:
    calls: list[Any] = []
    original = getattr(CopyStream, name)

    def call(self: CopyStream, *arguments: Any) -> Any:
        calls.append(arguments)
        return original(self, *arguments)

    with patch.object(CopyStream, name, call):
        yield calls


def check_kinds(where: str) -> None:
    """Every width and masters, snapshots on both sides, batches of one block and of all."""
    cases = [(width, False) for width in INT_DTYPES] + [(2, True)]
    for nbytes in (1, 1 << 20):
        with patch("deltachain.kernels.device_diff.BATCH_NBYTES", nbytes):
            for width, master in cases:
                for resident in (False, True):
                    weights = Weights(where, width=width, resident=resident, master=master)
                    diff = DeviceDiff(torch.device(where))
                    weights.add_to(diff)
                    weights.check(settle(diff))
                    weights.add_to(diff)
                    assert settle(diff) == {}


def check_mixed_kinds(where: str) -> None:
    """Tensors of several kinds in one diff, with names of their own."""
    diff, found = DeviceDiff(torch.device(where)), {}
    for width, master in ((2, False), (4, False), (2, True)):
        weights = Weights(where, width=width, resident=width == 4, master=master)
        weights.add_to(diff)
        found[width, master] = weights
    with counted("wait") as waits:
        settle(diff)
    assert len(waits) == 2, "once for the comparison, once for the copies"
    for weights in found.values():
        weights.add_to(diff)
    assert settle(diff) == {}


def check_no_change_and_all_changed(where: str) -> None:
    """Nothing, and every element: of a large tensor and of small ones."""
    for resident in (False, True):
        for density in (0.0, 1.0):
            weights = Weights(where, resident=resident, density=density)
            diff = DeviceDiff(torch.device(where))
            weights.add_to(diff)
            weights.check(settle(diff))


def check_launches_waits_and_copies(where: str) -> None:
    """None depends on the number of tensors, nor do waits on the number of batches."""
    from deltachain.kernels import fused_diff  # noqa: PLC0415 - needs Triton

    for count in (10, 300):
        weights = Weights(where, (64,) * count, resident=False)
        diff = DeviceDiff(torch.device(where))
        weights.add_to(diff)
        with (
            counted("wait") as waits,
            patch.object(fused_diff, "_launch", wraps=fused_diff._launch) as launch,
        ):
            weights.check(settle(diff))
        assert len(waits) == 2
        assert launch.call_count == 3
        assert sum(lane.copies for lane in diff.lanes.values()) == 1
    with patch("deltachain.kernels.device_diff.BATCH_NBYTES", 3 * 4096 * 2):
        weights = Weights(where, resident=False)
        diff = DeviceDiff(torch.device(where))
        weights.add_to(diff)
        with counted("wait") as waits:
            weights.check(settle(diff))
        assert len(waits) == 2


def check_bytes_that_cross_back(where: str) -> None:
    """At 1 % in bf16, 4.4 bytes a change with the snapshot on the host, else 6.4."""
    for resident, limit in ((False, 4.4), (True, 6.4)):
        weights = Weights(where, (400_000,), resident=resident)
        diff = DeviceDiff(torch.device(where))
        diff.expect(
            Compared("", weights.kept, 0, weights.live, weights.dtype, resident).kind, 400_000
        )
        weights.add_to(diff)
        found = settle(diff)
        weights.check(found)
        assert diff.streams.to_host_nbytes / found["w0"].indices.size <= limit
        sent = diff.streams.to_device_nbytes
        assert sent <= 0.02 * weights.kept.nbytes + (0 if resident else weights.kept.nbytes)


def check_a_drop(where: str) -> None:
    """What was dropped is not compared; the next diff is whole."""
    weights = Weights(where, resident=True)
    diff = DeviceDiff(torch.device(where))
    weights.add_to(diff)
    diff.drop()
    assert settle(diff) == {}
    weights.add_to(diff)
    weights.check(settle(diff))


def check_a_landing_that_fails_once(where: str) -> None:
    """A ``MemoryError`` in the middle loses no change: the next call resumes."""
    with patch("deltachain.kernels.device_diff.BATCH_NBYTES", 3 * 4096 * 2):
        weights = Weights(where, resident=False)
        diff = DeviceDiff(torch.device(where))
        weights.add_to(diff)
        landing, found = diff.land(), dict[str, Changes]()
    original, calls = host.exchange_blocks_, iter((False, True))

    def exchange(*arguments: Any) -> None:
        if next(calls, False):
            raise MemoryError
        original(*arguments)

    with patch.object(host, "exchange_blocks_", exchange):
        try:
            landing.complete(found)
        except MemoryError:
            landing.complete(found)
        else:
            raise AssertionError("there was one batch only")
    weights.check(found)


def check_other_casts(where: str) -> None:
    """Weights of a dtype that no kernel casts are cast by torch."""
    values = np.linspace(-3, 3, 9_000, dtype=np.float32)
    live = torch.from_numpy(values).to(where)
    for resident in (False, True):
        kept = torch.zeros(9_000, dtype=torch.int16, device=where if resident else "cpu")
        diff = DeviceDiff(torch.device(where))
        diff.add(Compared("w", kept, 0, live, torch.float16, resident))
        expected = values.astype(np.float16).view(np.uint16)
        np.testing.assert_array_equal(settle(diff)["w"].new, expected[expected != 0])
        np.testing.assert_array_equal(kept.cpu().numpy().view(np.uint16), expected)


def check_room_that_is_too_small(where: str) -> None:
    for resident in (False, True):
        with (
            patch("deltachain.kernels.device_diff.SMALLEST_ROOM", 100),
            patch("deltachain.kernels.device_diff.LARGEST_ROOM_SHARE", 1),
            patch("deltachain.kernels.device_diff.BATCH_NBYTES", 2 * 4096 * 2),
        ):
            weights = Weights(where, resident=resident, density=0.02)
            diff = DeviceDiff(torch.device(where))
            numel = sum(weights.sizes)
            kind = Compared("", weights.kept, 0, weights.live, weights.dtype, resident).kind
            diff.expect(kind, numel)
            for waits_expected in (True, False):
                weights.add_to(diff)
                with counted("wait") as waits:
                    weights.check(settle(diff))
                assert (len(waits) > 2) == waits_expected
                weights.kept.copy_(weights.slab_before())


MANY_CHECKS: tuple[Callable[[str], None], ...] = (
    check_kinds,
    check_mixed_kinds,
    check_no_change_and_all_changed,
    check_launches_waits_and_copies,
    check_bytes_that_cross_back,
    check_a_drop,
    check_a_landing_that_fails_once,
    check_other_casts,
    check_room_that_is_too_small,
)
