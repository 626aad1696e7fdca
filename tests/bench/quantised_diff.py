"""Benchmark of finding changed codes: weights cast, quantised and compared in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from deltachain.kernels import reference
from deltachain.kernels.quantised import Rounding, WindowBlocks
from deltachain.kernels.reference import Changes
from deltachain.types import Bits, Indices
from tests.bench.timing import Candidate

CODE_DENSITY: Final = 0.001
"""Codes that a step changes: about a tenth of its changed bf16 weights."""

COLUMNS: Final = 4096

ROWS_OF_A_BLOCK: Final = 128

SCHEMES: Final[dict[str, Rounding]] = {"fp8-block": "fp8-multiply", "int8-row": "int8-divide"}
"""Scheme -> how a weight and the factor of its block make a code."""

FLOORS: Final = {"fp32": "floor: read fp32 and codes", "bf16": "floor: read bf16 and codes"}
"""Dtype of the weights -> what reads them and the snapshot's codes once."""


def one_pass(scheme: str, dtype: str) -> str:
    return f"numba codes_diff_, {scheme} of {dtype}"


def passes(scheme: str, dtype: str) -> str:
    return f"numba, passes, {scheme} of {dtype}"


AIMS: Final[dict[str, tuple[str, float]]] = {
    one_pass(scheme, dtype): (FLOORS[dtype], aim)
    for scheme in SCHEMES
    for dtype, aim in (("fp32", 0.2), ("bf16", 0.15))
}
"""Candidate -> its baseline, and the smallest allowed fraction of the baseline's speed."""

BASELINES: Final[dict[str, str]] = {
    name(scheme, dtype): FLOORS[dtype]
    for name in (one_pass, passes)
    for scheme in SCHEMES
    for dtype in FLOORS
} | {floor: floor for floor in FLOORS.values()}


@dataclass(frozen=True, slots=True)
class Coded:
    """Weights in both precisions, and an older snapshot of their codes."""

    scheme: str
    master: npt.NDArray[np.float32]
    weights: npt.NDArray[np.uint16]
    table: npt.NDArray[np.float32]
    current: Bits
    snapshot: Bits
    indices: Indices
    old: Bits

    @classmethod
    def of(cls, scheme: str, master: npt.NDArray[np.float32], seed: int = 0) -> Coded:
        rng = np.random.default_rng(seed)
        columns = COLUMNS if master.size >= COLUMNS * ROWS_OF_A_BLOCK else ROWS_OF_A_BLOCK
        matrix = master.reshape(-1, columns)
        weights = reference.cast_bf16(master).reshape(matrix.shape)
        table = _table(scheme)
        none = np.empty(0, np.uint8)
        made = cls(scheme, matrix, weights, table, none, none, np.empty(0, np.int64), none)
        current = made.codes(made.bits("bf16"))
        indices = np.flatnonzero(rng.random(current.size, np.float32) < CODE_DENSITY)
        snapshot = current.copy()
        snapshot[indices] ^= np.uint8(1)
        old = snapshot[indices]
        return cls(scheme, matrix, weights, table, current, snapshot, indices, old)

    @property
    def blocks(self) -> WindowBlocks:
        is_row = self.scheme == "int8-row"
        size = (1, self.master.shape[1]) if is_row else (ROWS_OF_A_BLOCK, ROWS_OF_A_BLOCK)
        return WindowBlocks((0, 0), size)

    def bits(self, dtype: str) -> npt.NDArray[Any]:
        return self.master.view(np.uint32) if dtype == "fp32" else self.weights

    def nothing(self) -> npt.NDArray[np.uint16]:
        (rows, columns), (height, width) = self.master.shape, self.blocks.size
        return np.zeros((-(-rows // height), -(-columns // width)), np.uint16)

    def codes(self, weights: npt.NDArray[Any]) -> Bits:
        from deltachain.kernels.codes import block_amax, quantise_codes  # noqa: PLC0415 - numba

        amax, out = self.nothing(), np.empty(weights.shape, np.uint8)
        block_amax(weights, self.blocks, amax)
        rounding = SCHEMES[self.scheme]
        quantise_codes(weights, self.table[amax], self.blocks, rounding, out)
        return out.reshape(-1)

    def restore(self) -> None:
        self.snapshot[self.indices] = self.old

    def find(self, dtype: str) -> Changes:
        from deltachain.kernels.codes import BlockFactors, codes_diff_  # noqa: PLC0415 - numba

        factors = BlockFactors(self.nothing(), self.table, known=False)
        return codes_diff_(
            self.snapshot, self.bits(dtype), factors, self.blocks, SCHEMES[self.scheme]
        )[0]

    def find_in_passes(self, dtype: str) -> Changes:
        from deltachain.kernels import jit  # noqa: PLC0415 - numba

        weights = self.weights
        if dtype == "fp32":
            cast = torch.from_numpy(self.master).to(torch.bfloat16)
            weights = cast.view(torch.int16).numpy().view(np.uint16)
        return jit.diff_(self.snapshot, self.codes(weights))

    def check(self, name: str, kernel: Callable[[], Changes]) -> None:
        self.restore()
        wanted = (self.indices, self.old, self.current[self.indices])
        exact = all(map(np.array_equal, kernel(), wanted))
        if not exact or not np.array_equal(self.snapshot, self.current):
            raise ArithmeticError(f"{name} does not find what changed")


def candidates(master: npt.NDArray[np.float32]) -> Iterator[Candidate]:
    from tests.bench import floors  # noqa: PLC0415 - needs numba

    every = [Coded.of(scheme, master) for scheme in SCHEMES]
    for dtype, floor in FLOORS.items():
        words = every[0].bits(dtype).reshape(-1).view(np.uint64)
        codes = every[0].snapshot.view(np.uint64)
        yield Candidate(floor, partial(floors.read_weights, codes, words))
    for coded in every:
        for dtype in FLOORS:
            for name, kernel in ((one_pass, coded.find), (passes, coded.find_in_passes)):
                run = partial(kernel, dtype)
                coded.check(name(coded.scheme, dtype), run)
                yield Candidate(name(coded.scheme, dtype), run, coded.restore)


def _table(scheme: str) -> npt.NDArray[np.float32]:
    bits = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16)
    amax = bits.view(torch.bfloat16).float()
    factors = (amax / 127.0).bfloat16().float() if scheme == "int8-row" else 448.0 / amax
    factors[0] = 1.0
    table: npt.NDArray[np.float32] = torch.where(
        amax.isfinite() & factors.isfinite(), factors, torch.zeros(())
    ).numpy()
    return table
