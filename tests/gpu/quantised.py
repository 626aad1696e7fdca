"""Benchmark of the diff of weights that are quantised on a card, beside its floor."""

from __future__ import annotations

import statistics
import time
from itertools import product
from typing import Any

import torch

from deltachain.kernels.crossing import DeviceDiff
from deltachain.kernels.factors import Factors, Quantising
from deltachain.kernels.lane import Compared
from deltachain.kernels.proven import fused_is_proven
from deltachain.kernels.reference import Changes
from tests.gpu.diff import floors

MATRICES = tuple(32 * ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096)))
"""Matrices of about half of a dense model of 8 B, as Llama 3 8B has them."""

SCHEMES = {
    "fp8-block": Quantising("fp8-multiply", (128, 128)),
    "int8-row": Quantising("int8-divide", (1, 0)),
}
DENSITY = 0.001
REPEATS = 3


class Matrices:
    def __init__(self, how: Quantising, *, master: bool, where: str, divisor: int) -> None:
        self._tensors: list[Compared] = []
        shapes = [(rows, max(8, columns // divisor)) for rows, columns in MATRICES]
        self.numel = sum(rows * columns for rows, columns in shapes)
        self._kept = torch.zeros(self.numel, dtype=torch.uint8, device=where)
        self._flips = torch.rand(max(r * c for r, c in shapes), device=where) < DENSITY
        at = 0
        for number, (rows, columns) in enumerate(shapes):
            weights = torch.randn(rows * columns, device=where) * 0.02
            current = weights if master else weights.bfloat16()
            sides = [
                -(-n // side) if side else 1
                for n, side in zip((rows, columns), how.block, strict=True)
            ]
            factor = 4000.0 if how.rounding == "fp8-multiply" else 0.001
            factors = Factors(torch.full(sides, factor, device=where), columns, (0, 0), how)
            one = Compared(str(number), self._kept, at, current, torch.uint8, True, factors)
            self._tensors.append(one)
            at += rows * columns

    def change(self) -> int:
        changed = torch.zeros((), dtype=torch.int64, device=self._kept.device)
        for tensor in self._tensors:
            numel = tensor.current.numel()
            flips = self._flips[:numel]
            self._kept[tensor.at : tensor.at + numel].bitwise_xor_(flips.to(torch.uint8))
            changed += flips.sum()
        return int(changed)

    def find(self, diff: DeviceDiff) -> dict[str, Changes]:
        found: dict[str, Changes] = {}
        for tensor in self._tensors:
            diff.add(tensor)
        diff.settle(found)
        return found


def bench_quantised(where: str, divisor: int | None = None) -> dict[str, Any]:
    known = floors(where)
    figures: dict[str, Any] = {"floors": known}
    kernels = {"fused": True} if fused_is_proven(torch.device(where)) else {}
    for (scheme, how), master in product(SCHEMES.items(), (True, False)):
        matrices = Matrices(how, master=master, where=where, divisor=divisor or 1)
        for name, fused in ({"torch": False} | kernels).items():
            taken, changes = _times(matrices, where, fused=fused)
            nbytes = (5 if master else 3) * matrices.numel
            source = "fp32" if master else "bf16"
            figures[f"{scheme} of {source}, {name}"] = {
                "numel": matrices.numel,
                "seconds": taken,
                "changes": changes,
                "floor_over_ours": nbytes / (1e9 * known["device_copy_gbps"]) / taken,
            }
    return figures


def _times(matrices: Matrices, where: str, *, fused: bool) -> tuple[float, int]:
    diff, seconds, changes = DeviceDiff(torch.device(where), fused=fused), [], 0
    matrices.find(diff)  # the snapshot is made equal
    for number in range(REPEATS + 1):
        changes = matrices.change()
        start = time.perf_counter()
        found = matrices.find(diff)  # waits for the changes
        if number:  # the first takes memory
            seconds.append(time.perf_counter() - start)
        assert sum(one.indices.size for one in found.values()) == changes
    return statistics.median(seconds), changes
