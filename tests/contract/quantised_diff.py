"""What a diff on a device promises of weights that are quantised while they are compared."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from deltachain.kernels import reference
from deltachain.kernels.crossing import DeviceDiff
from deltachain.kernels.factors import BlockShape, Factors, Quantising, codes_by_factors
from deltachain.kernels.lane import Compared
from deltachain.kernels.quantised import Rounding
from deltachain.kernels.reference import Changes
from tests.contract.many_tensors import settle

ROUNDINGS: tuple[Rounding, ...] = ("int8-divide", "fp8-divide", "fp8-multiply")
BLOCKS: tuple[BlockShape, ...] = ((128, 128), (1, 0), (0, 0))
SHAPES = ((1, 5000), (70, 130), (3, 4096), (129, 33), (1, 1))
GUARD = 64


def every_kind(generator: torch.Generator, numel: int, *, master: bool) -> Tensor:
    values = torch.randn(numel, generator=generator) * 0.02
    choice = torch.rand(numel, generator=generator)
    values[choice < 0.05] *= 1e-4
    values[choice < 0.04] = 0.0
    values[choice < 0.03] = -0.0
    values[choice < 0.02] = 1e-40
    values[choice < 0.015] = torch.randint(-448, 448, (numel,), generator=generator)[
        choice < 0.015
    ].float()
    halves = torch.randint(-1000, 1000, (numel,), generator=generator) / 2
    values = torch.where((choice > 0.3) & (choice < 0.5), halves * 2.0**-9, values)
    if not master:
        return values.bfloat16()
    # Between two bf16 numbers, and exactly halfway.
    bits = values.view(torch.int32)
    bits[(choice > 0.5) & (choice < 0.6)] |= 0x8000
    bits[(choice > 0.5) & (choice < 0.55)] &= ~0x7FFF
    return values


class Windows:
    """Windows of matrices that are quantised, and a snapshot of their codes in one slab."""

    def __init__(
        self,
        where: str,
        how: Quantising,
        *,
        master: bool,
        resident: bool,
        density: float = 0.02,
        shapes: tuple[tuple[int, int], ...] = SHAPES,
    ) -> None:
        generator, rng = torch.Generator().manual_seed(1), np.random.default_rng(2)
        self.resident, self.where = resident, where
        self.live: list[Tensor] = []
        self.factors: list[Factors] = []
        self.codes: list[Any] = []
        self.starts: list[int] = []
        self.held: list[Tensor] = []
        at = GUARD
        for number, (rows, columns) in enumerate(shapes):
            weights = every_kind(generator, rows * columns, master=master)
            corner = (number * 37 % how.block[0] if how.block[0] else 0, 0)
            if how.block[1]:
                corner = corner[0], number * 53 % how.block[1]
            grid = tuple(
                -(-(first + count) // side) if side else 1
                for first, count, side in zip(corner, (rows, columns), how.block, strict=True)
            )
            table = torch.full((2 * GUARD + grid[0] * grid[1],), torch.nan)
            inner = torch.rand(grid, generator=generator) * 20 + 0.001
            table[GUARD:-GUARD] = inner.flatten()
            there = table.to(where)
            factors = Factors(inner, columns, corner, how)
            self.held.append(there)
            self.live.append(weights.to(where))
            self.factors.append(factors._replace(values=there[GUARD:-GUARD].view(grid)))
            self.codes.append(codes_by_factors(weights, factors, 0).numpy())
            self.starts.append(at)
            at += -(-rows * columns // 16) * 16 + GUARD
        self.before = np.full(at, 0x55, np.uint8)
        for start, codes in zip(self.starts, self.codes, strict=True):
            changed = rng.random(codes.size) < density
            self.before[start : start + codes.size] = np.where(changed, codes ^ 1, codes)
        self.kept = torch.from_numpy(self.before.copy()).to(where if resident else "cpu")
        if torch.device(where).type == "cuda" and not resident:
            self.kept = self.kept.pin_memory()

    def add_to(self, diff: DeviceDiff) -> None:
        for number, (start, live) in enumerate(zip(self.starts, self.live, strict=True)):
            factors = self.factors[number]
            one = Compared(
                f"w{number}", self.kept, start, live, torch.uint8, self.resident, factors
            )
            diff.add(one)

    def check(self, found: dict[str, Changes]) -> None:
        after = self.before.copy()
        for number, (start, codes) in enumerate(zip(self.starts, self.codes, strict=True)):
            expected = reference.diff_(after[start : start + codes.size], codes)
            none = Changes(expected.indices[:0], expected.old[:0], expected.new[:0])
            for one, other in zip(expected, found.get(f"w{number}", none), strict=True):
                assert one.dtype == other.dtype
                np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(self.kept.cpu().numpy(), after)


def check_codes(where: str, fused: bool) -> None:
    cases = product(ROUNDINGS, BLOCKS, (False, True), (False, True))
    for number, (rounding, block, master, resident) in enumerate(cases):
        nbytes = 1 if number % 4 == 0 else 1 << 20
        with patch("deltachain.kernels.blocks.BATCH_NBYTES", nbytes):
            how = Quantising(rounding, block)
            windows = Windows(where, how, master=master, resident=resident)
            diff = DeviceDiff(torch.device(where), fused=fused)
            windows.add_to(diff)
            windows.check(settle(diff))
            windows.add_to(diff)
            assert settle(diff) == {}


def check_odd_addresses(where: str, fused: bool) -> None:
    for master in (False, True):
        how = Quantising("fp8-multiply", (128, 128))
        windows = Windows(where, how, master=master, resident=True)
        windows.live = [torch.cat([one[:1], one])[1:] for one in windows.live]
        diff = DeviceDiff(torch.device(where), fused=fused)
        windows.add_to(diff)
        windows.check(settle(diff))


def check_dense_blocks(where: str, fused: bool) -> None:
    for resident in (False, True):
        how = Quantising("int8-divide", (1, 0))
        windows = Windows(where, how, master=True, resident=resident, density=1.0)
        diff = DeviceDiff(torch.device(where), fused=fused)
        windows.add_to(diff)
        windows.check(settle(diff))


def check_refused_blocks(where: str, fused: bool) -> None:
    for rounding, master in product(ROUNDINGS, (False, True)):
        how = Quantising(rounding, (128, 128))
        windows = Windows(where, how, master=master, resident=True, shapes=((130, 140),))
        windows.live[0][::977] = torch.nan
        windows.live[0][1::977] = torch.inf
        windows.factors[0].values[0, 0] = 0.0
        diff = DeviceDiff(torch.device(where), fused=fused)
        windows.add_to(diff)
        found = settle(diff)["w0"]
        start, numel = windows.starts[0], windows.codes[0].size
        after = windows.kept.cpu().numpy()
        mine = after[start : start + numel]
        np.testing.assert_array_equal(mine[found.indices], found.new)
        mine[found.indices] = found.old
        np.testing.assert_array_equal(after, windows.before)


QUANTISED_CHECKS: tuple[Callable[[str, bool], None], ...] = (
    check_codes,
    check_odd_addresses,
    check_dense_blocks,
    check_refused_blocks,
)
