"""Benchmark of finding changes, relative to a pass that only reads and compares.

Changes are scattered uniformly, the hardest case for kernels that skip equal blocks. Every
candidate updates its snapshot; the old bits are restored before each repetition, outside the
timing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import numba
import numpy as np
import numpy.typing as npt
import torch

from deltachain.kernels.arrays import Changes
from deltachain.types import Bits, Indices
from tests.bench import report
from tests.bench.report import Candidate, Timings, one_core, round_robin, say
from tests.contract import reference

NUMEL: Final = 1 << 26
DENSITY: Final = 0.012
ROUNDS: Final = 20

FLOOR: Final = "floor: read both, compare"
CAST_FLOOR: Final = "floor: read fp32 and bf16"

Kernel = Callable[[Bits, Any], Changes]

_F = TypeVar("_F", bound=Callable[..., Any])
_njit: Final[Any] = numba.njit(nogil=True, cache=True)


def _jit(function: _F) -> _F:
    compiled: _F = _njit(function)
    return compiled


@_jit
def _read_both(one: Any, other: Any) -> Any:
    found = np.uint64(0)
    for i in range(one.shape[0]):
        found |= one[i] ^ other[i]
    return found


@_jit
def _read_master(snapshot: Any, master: Any) -> Any:
    found = np.uint64(0)
    for i in range(snapshot.shape[0]):
        found |= master[2 * i] ^ master[2 * i + 1] ^ snapshot[i]
    return found


@dataclass(frozen=True, slots=True)
class Data:
    """Weights as fp32 masters and as bf16 bits, and a snapshot with old bits at some indices."""

    master: npt.NDArray[np.float32]
    current: Bits
    snapshot: Bits
    indices: Indices
    old: Bits

    @classmethod
    def generate(cls, numel: int, density: float, seed: int = 0) -> "Data":
        """Generate normal weights; ``density`` of them changed by one unit in the last place."""
        rng = np.random.default_rng(seed)
        master = rng.standard_normal(numel, np.float32) * np.float32(0.025)
        current = reference.cast_bf16(master)
        indices = np.flatnonzero(rng.random(numel, np.float32) < density)
        snapshot = current.copy()
        snapshot[indices] -= rng.choice(np.array([1, 0xFFFF], np.uint16), indices.size)
        return cls(master, current, snapshot, indices, snapshot[indices])

    def restore(self) -> None:
        self.snapshot[self.indices] = self.old

    def check(self, name: str, kernel: Callable[[], Changes]) -> None:
        """Check that a kernel finds exactly the changes and updates the snapshot."""
        self.restore()
        found = kernel()
        wanted = (self.indices, self.old, self.current[self.indices])
        exact = all(map(np.array_equal, found, wanted))
        if not exact or not np.array_equal(self.snapshot, self.current):
            raise ArithmeticError(f"{name} does not find what changed")


def torch_naive(snapshot: Bits, current: Bits) -> Changes:
    """Detect changes naively: ``nonzero`` of ``ne``, then a gather of both."""
    kept, now = (torch.from_numpy(bits.view(np.int16)) for bits in (snapshot, current))
    indices = torch.nonzero(torch.ne(kept, now)).view(-1)
    old, new = kept[indices], now[indices]
    kept[indices] = new
    old_bits, new_bits = (bits.numpy().view(np.uint16) for bits in (old, new))
    return Changes(indices.numpy(), old_bits, new_bits)


def measure(data: Data, rounds: int) -> Timings:
    """Check every kernel, then measure all of them and the floors on one core."""
    from deltachain.kernels import numba_kernels  # noqa: PLC0415

    kernels: dict[str, tuple[Kernel, npt.NDArray[Any]]] = {
        "numba diff_": (numba_kernels.diff_, data.current),
        "numpy, naive": (reference.diff_, data.current),
        "torch, naive": (torch_naive, data.current),
        "numba cast_diff_": (numba_kernels.cast_diff_, data.master),
    }
    words, now, wide = (
        array.view(np.uint64) for array in (data.snapshot, data.current, data.master)
    )
    candidates = [
        Candidate(FLOOR, partial(_read_both, words, now), data.restore),
        Candidate(CAST_FLOOR, partial(_read_master, words, wide), data.restore),
    ]
    with one_core():
        for name, (kernel, source) in kernels.items():
            run = partial(kernel, data.snapshot, source)
            data.check(name, run)
            candidates.append(Candidate(name, run, data.restore))
        return round_robin(candidates, rounds)


def rows(timings: Timings, numel: int) -> list[dict[str, Any]]:
    """Every candidate beside its floor; by floor, fastest first."""
    found = []
    for name in timings.seconds:
        floor = CAST_FLOOR if "cast" in name or name == CAST_FLOOR else FLOOR
        row = report.speeds(name, timings, 2 * numel)
        found.append(row | {"floor": floor, "ratio": timings.ratio(name, floor)})
    return sorted(found, key=lambda row: (row["floor"], row["best_s"]))


def run(*, numel: int = NUMEL, density: float = DENSITY, rounds: int = ROUNDS) -> Mapping[str, Any]:
    say(f"{numel / 1e6:.0f} M elements, {density:.2%} changed")
    data = Data.generate(numel, density)
    return {
        "benchmark": "detect",
        "numel": numel,
        "density": data.indices.size / numel,
        "rounds": rounds,
        "rows": rows(measure(data, rounds), numel),
        "machine": report.machine(),
    }


def main(*, json_output: bool) -> int:
    result = run()
    title = f"Find {result['density']:.2%} of {result['numel'] / 1e6:.0f} M bf16 elements"
    table = report.grid(title, "", "best ms", "GB/s", "of floor")
    for row in result["rows"]:
        figures = (f"{row['best_s'] * 1e3:.1f}", f"{row['gb_per_s']:.1f}", f"{row['ratio']:.2f}")
        table.add_row(row["name"], *figures)
    report.emit(result, [table], json_output=json_output)
    return 0
