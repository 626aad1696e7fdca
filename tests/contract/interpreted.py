"""The contract of batched kernels, on Triton's interpreter: ``TRITON_INTERPRET=1 python -m``."""

import ctypes
import mmap
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from deltachain.kernels import segments, staging
from tests.contract.batches import BATCH_CHECKS, GUARD, BatchArm, Given, batch_of
from tests.contract.kernels import ProgramArm, check_digest

PAGE = mmap.PAGESIZE
NO_ACCESS = 0
_empty = torch.empty


@dataclass(frozen=True)
class GuardedArm(BatchArm):
    maps: dict[int, mmap.mmap] = field(default_factory=dict)

    def decode(self, batch: segments.SegmentBatch) -> segments.ChangeBatch:
        guarded = replace(batch, buffer=before_a_wall(batch.buffer, self.maps))
        return staging.decode(guarded, staging.upload(guarded, self.device))


def before_a_wall(buffer: Any, maps: dict[int, mmap.mmap]) -> Any:
    pages = -(-buffer.nbytes // PAGE) + 1
    if pages not in maps:
        maps[pages] = mmap.mmap(-1, pages * PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(maps[pages]))
        wall = ctypes.c_void_p(base + (pages - 1) * PAGE)
        if ctypes.CDLL(None).mprotect(wall, ctypes.c_size_t(PAGE), NO_ACCESS):
            raise OSError("mprotect")
    # The table at the beginning is aligned to 8 bytes, which leaves up to 7 before the wall.
    end = (pages - 1) * PAGE - (-buffer.nbytes) % 8 - buffer.nbytes
    whole = np.frombuffer(maps[pages], np.uint8, buffer.nbytes, offset=end)
    whole[:] = buffer
    return whole


class Guards:
    """Replacement of ``torch.empty`` with guards around what it returns."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []

    def empty(self, shape: Any, **options: Any) -> Tensor:
        size = torch.Size([shape] if isinstance(shape, int) else shape)
        whole = _empty(size.numel() + 2 * GUARD, **options)
        whole.view(torch.uint8).fill_(0xAA)
        self.made.append(whole)
        return whole[GUARD:-GUARD].view(size)

    def check(self) -> None:
        assert self.made
        for whole in self.made:
            ends = torch.cat([whole[:GUARD], whole[-GUARD:]]).view(torch.uint8)
            assert bool((ends == 0xAA).all())
        self.made.clear()


def check_launches(arm: BatchArm) -> None:
    rng = np.random.default_rng(26)
    layout = segments.StreamLayout(2, 1, absolute=False)
    for tensors in (10, 100):
        given = []
        for tensor in range(tensors):
            indices = np.flatnonzero(rng.random(50) < 0.2)
            given.append(Given(tensor, 50, indices, np.ones(indices.size, np.uint16)))
        live = [torch.zeros(50, dtype=torch.int16) for _ in given]
        placements = [segments.LivePlacement(t, 0, [(50, 1, 1)], one) for t, one in enumerate(live)]
        table = segments.PlacementTable.build(placements, [(1, 2)] * tensors, arm.device)
        counts = []
        with mock.patch.object(staging, "launch", wraps=staging.launch) as launch:
            changes = arm.decode(batch_of(given, layout))
            counts.append(launch.call_count)
            staged = staging.stage(changes, table, ["w"] * tensors)
            counts.append(launch.call_count)
            staging.write_(staged)
            counts.append(launch.call_count)
        assert counts == [1, 3, 4]
        assert all(int(one.sum()) == g.indices.size for one, g in zip(live, given, strict=True))


def main() -> int:
    """Run every check; print a line for each."""
    arm, guards = GuardedArm(torch.device("cpu")), Guards()
    for check in (*BATCH_CHECKS, check_launches):
        start = time.perf_counter()
        with mock.patch.object(torch, "empty", guards.empty):
            check(arm)
        guards.check()
        sys.stdout.write(f"ok {check.__name__} {time.perf_counter() - start:.1f} s\n")
    check_digest(ProgramArm("cpu"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
