"""Benchmark of finding changes, relative to a pass that only reads and compares.

Changes are scattered uniformly, the hardest case for kernels that skip equal blocks. Every
candidate updates its snapshot; the old bits are restored before each repetition, outside the
timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Final, TypeVar

import numba
import numpy as np
import numpy.typing as npt
import torch

from deltachain.errors import ConfigError
from deltachain.kernels import reference
from deltachain.kernels.reference import Changes
from deltachain.types import Bits, Indices
from tests.bench import report
from tests.bench.report import Candidate, Timings, one_core, round_robin, say

_F = TypeVar("_F", bound=Callable[..., Any])
_njit: Final[Any] = numba.njit


def _jit(function: _F) -> _F:
    compiled: _F = _njit(nogil=True, cache=True)(function)
    return compiled


@_jit
def read_both(one: Any, other: Any) -> Any:
    found = np.uint64(0)
    for i in range(one.shape[0]):
        found |= one[i] ^ other[i]
    return found


@_jit
def read_master(snapshot: Any, master: Any) -> Any:
    found = np.uint64(0)
    for i in range(snapshot.shape[0]):
        found |= master[2 * i] ^ master[2 * i + 1] ^ snapshot[i]
    return found


@_jit
def read_weights(codes: Any, weights: Any) -> Any:
    found = np.uint64(0)
    for i in range(codes.shape[0]):
        found |= codes[i]
    for i in range(weights.shape[0]):
        found ^= weights[i]
    return found


NUMEL: Final = 1 << 26
DENSITY: Final = 0.012
ROUNDS: Final = 20

FLOOR: Final = "floor: read both, compare"
CAST_FLOOR: Final = "floor: read fp32 and bf16"
NUMBA: Final = "numba diff_"
CAST_NUMBA: Final = "numba cast_diff_"

COPY: Final = "memcpy of one side"
PASSES: Final = (FLOOR, COPY, CAST_FLOOR)
"""Candidates that find nothing."""

CHANGE_NBYTES: Final = 12.0
"""Bytes of a change in the result: its int64 index, old bits and new bits."""

AIMS: Final[dict[str, tuple[str, float]]] = {
    NUMBA: (FLOOR, 0.5),
    CAST_NUMBA: (CAST_FLOOR, 0.35),
}
"""Candidate -> its baseline, and the smallest allowed fraction of the baseline's speed."""

Kernel = Callable[[Bits, Any], Changes]


@dataclass(frozen=True, slots=True)
class Data:
    """Weights in both precisions, and an older snapshot.

    Attributes:
        master: fp32 values, shape (numel,).
        current: Their bf16 bits.
        snapshot: bf16 bits that differ from ``current`` at ``indices``; written by kernels.
        indices: Indices of the changed elements.
        old: Bits of the snapshot at ``indices``.
    """

    master: npt.NDArray[np.float32]
    current: Bits
    snapshot: Bits
    indices: Indices
    old: Bits

    @classmethod
    def generate(cls, numel: int, density: float, seed: int = 0) -> Data:
        """Generate normal weights; ``density`` of them changed by one unit in the last place."""
        rng = np.random.default_rng(seed)
        master = rng.standard_normal(numel, np.float32) * np.float32(0.025)
        current = reference.cast_bf16(master)
        indices = np.flatnonzero(rng.random(numel, np.float32) < density)
        snapshot = current.copy()
        snapshot[indices] -= rng.choice(np.array([1, 0xFFFF], np.uint16), indices.size)
        return cls(master, current, snapshot, indices, snapshot[indices])

    def restore(self) -> None:
        """Restore the old snapshot."""
        self.snapshot[self.indices] = self.old

    def check(self, name: str, kernel: Callable[[], Changes]) -> None:
        """Check that a kernel finds exactly the changes and updates the snapshot.

        Raises:
            ArithmeticError: The kernel's result is wrong.
        """
        self.restore()
        found = kernel()
        wanted = (self.indices, self.old, self.current[self.indices])
        exact = all(map(np.array_equal, found, wanted))
        if not exact or not np.array_equal(self.snapshot, self.current):
            raise ArithmeticError(f"{name} does not find what changed")


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectRow:
    """One candidate: seconds, dense bf16 GB/s, and fractions of its baseline's speed.

    Attributes:
        threads: Number of threads.
        host_per_change: Bytes of the result in host memory for each change.
    """

    name: str
    best_s: float
    median_s: float
    gb_per_s: float
    ratio: float
    paired_ratio: float
    aim: float | None
    threads: int
    host_per_change: float


def torch_naive(snapshot: Bits, current: Bits) -> Changes:
    """Detect changes naively: ``nonzero`` of ``ne``, then a gather of both."""
    kept, now = (torch.from_numpy(bits.view(np.int16)) for bits in (snapshot, current))
    indices = torch.nonzero(torch.ne(kept, now)).view(-1)
    old, new = kept[indices], now[indices]
    kept[indices] = new
    old_bits, new_bits = (bits.numpy().view(np.uint16) for bits in (old, new))
    return Changes(indices.numpy(), old_bits, new_bits)


def measure(data: Data, rounds: int) -> Timings:
    """Check every kernel, then measure all of them and the baselines on one core."""
    from deltachain.kernels import jit  # noqa: PLC0415

    kernels: dict[str, tuple[Kernel, npt.NDArray[Any]]] = {
        NUMBA: (jit.diff_, data.current),
        "numpy, naive": (reference.diff_, data.current),
        "torch, naive": (torch_naive, data.current),
        CAST_NUMBA: (jit.cast_diff_, data.master),
    }
    words, now, wide = (
        array.view(np.uint64) for array in (data.snapshot, data.current, data.master)
    )
    copy = np.empty_like(data.current)
    candidates = [
        Candidate(FLOOR, partial(read_both, words, now), data.restore),
        Candidate(COPY, partial(np.copyto, copy, data.current)),
        Candidate(CAST_FLOOR, partial(read_master, words, wide), data.restore),
    ]
    with one_core():
        for name, (kernel, source) in kernels.items():
            run = partial(kernel, data.snapshot, source)
            data.check(name, run)
            candidates.append(Candidate(name, run, data.restore))
        return round_robin(candidates, rounds)


def rows(timings: Timings, numel: int) -> list[DetectRow]:
    """Compare every candidate with its baseline; sort by baseline, fastest first."""
    found = []
    for name in timings.seconds:
        floor = baseline(name)
        found.append(
            DetectRow(
                name=name,
                best_s=timings.best(name),
                median_s=timings.typical(name),
                gb_per_s=2 * numel / timings.best(name) / 1e9,
                ratio=timings.ratio(name, floor),
                paired_ratio=timings.paired_ratio(name, floor),
                aim=AIMS[name][1] if name in AIMS else None,
                threads=1,
                host_per_change=_on_host(name),
            )
        )
    order = (FLOOR, CAST_FLOOR)
    return sorted(found, key=lambda row: (order.index(baseline(row.name)), row.best_s))


def baseline(name: str) -> str:
    """Return the floor that a candidate is compared with."""
    return CAST_FLOOR if "cast" in name or name == CAST_FLOOR else FLOOR


def _on_host(name: str) -> float:
    """Return the bytes of the result for each change."""
    return 0.0 if name in PASSES else CHANGE_NBYTES


def missed(found: Sequence[DetectRow]) -> list[str]:
    """Return the names of candidates slower than their limit."""
    return [row.name for row in found if row.aim is not None and row.ratio < row.aim]


def document(data: Data, found: Sequence[DetectRow], rounds: int) -> dict[str, Any]:
    """Return all figures for JSON."""
    return {
        "benchmark": "detect",
        "numel": data.current.size,
        "density": data.indices.size / data.current.size,
        "rounds": rounds,
        "threads": 1,
        "rows": [asdict(row) for row in found],
        "missed": missed(found),
        "machine": report.machine(),
    }


def run(*, numel: int = NUMEL, density: float = DENSITY, rounds: int = ROUNDS) -> Mapping[str, Any]:
    """Generate, check and measure; return all figures for JSON.

    Raises:
        ConfigError: numba, which the baselines need, is not installed.
    """
    if find_spec("numba") is None:
        raise ConfigError("this benchmark needs numba", hint="pip install 'deltachain[fast]'")
    say(f"{numel / 1e6:.0f} M elements, {density:.2%} changed")
    data = Data.generate(numel, density)
    return document(data, rows(measure(data, rounds), numel), rounds)


def main(*, json_output: bool) -> int:
    """Run ``deltachain bench detect``; return 0 if all candidates are within their limits."""
    result = run()
    title = f"Find {result['density']:.2%} of {result['numel'] / 1e6:.0f} M bf16 elements"
    columns = ("best ms", "median ms", "GB/s", "of floor", "paired", "aim", "threads")
    table = report.grid(title, "", *columns)
    for row in result["rows"]:
        table.add_row(
            row["name"],
            f"{row['best_s'] * 1e3:.1f}",
            f"{row['median_s'] * 1e3:.1f}",
            f"{row['gb_per_s']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['paired_ratio']:.2f}",
            "" if row["aim"] is None else f"{row['aim']:.2f}",
            str(row["threads"]),
            f"{row['host_per_change']:.1f}",
        )
    report.emit(result, [table], json_output=json_output)
    return 1 if result["missed"] else 0
