"""Benchmark of finding changes, relative to a pass that only reads and compares.

Changes are scattered uniformly, the hardest case for kernels that skip equal blocks; those of
quantised weights are in :mod:`.quantised_diff`. Every candidate updates its snapshot; the old
bits are restored before each repetition, outside the timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from deltachain.errors import ConfigError
from deltachain.kernels import reference, twolevel
from deltachain.kernels.crossing import DeviceDiff
from deltachain.kernels.lane import Compared
from deltachain.kernels.reference import Changes
from deltachain.types import Bits, Indices
from tests.bench import quantised_diff, report
from tests.bench.timing import Candidate, Timings, one_core, round_robin, say

NUMEL: Final = 1 << 26
DENSITY: Final = 0.012
ROUNDS: Final = 20

FLOOR: Final = "floor: read both, compare"
CAST_FLOOR: Final = "floor: read fp32 and bf16"
NUMBA: Final = "numba diff_"
NUMPY: Final = "numpy diff_, two levels"
CAST_NUMBA: Final = "numba cast_diff_"
DEVICE_HOST: Final = "device path, snapshot on the host"
DEVICE: Final = "device path, snapshot there"

COPY: Final = "memcpy of one side"
PASSES: Final = (FLOOR, COPY, CAST_FLOOR, *quantised_diff.FLOORS.values())

CHANGE_NBYTES: Final = 12.0
"""Bytes of a change in the result: its int64 index, old bits and new bits."""

CODE_CHANGE_NBYTES: Final = 10.0

AIMS: Final[dict[str, tuple[str, float]]] = {
    NUMBA: (FLOOR, 0.5),
    NUMPY: (FLOOR, 0.25),
    CAST_NUMBA: (CAST_FLOOR, 0.35),
    **quantised_diff.AIMS,
}
"""Candidate -> its baseline, and the smallest allowed fraction of the baseline's speed."""

Kernel = Callable[[Bits, Any], Changes]


@dataclass(frozen=True, slots=True)
class Data:
    """Weights in both precisions, and an older snapshot."""

    master: npt.NDArray[np.float32]
    current: Bits
    snapshot: Bits
    indices: Indices
    old: Bits

    @classmethod
    def generate(cls, numel: int, density: float, seed: int = 0) -> Data:
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
        self.restore()
        found = kernel()
        wanted = (self.indices, self.old, self.current[self.indices])
        exact = all(map(np.array_equal, found, wanted))
        if not exact or not np.array_equal(self.snapshot, self.current):
            raise ArithmeticError(f"{name} does not find what changed")


def torch_naive(snapshot: Bits, current: Bits) -> Changes:
    kept, now = (torch.from_numpy(bits.view(np.int16)) for bits in (snapshot, current))
    indices = torch.nonzero(torch.ne(kept, now)).view(-1)
    old, new = kept[indices], now[indices]
    kept[indices] = new
    old_bits, new_bits = (bits.numpy().view(np.uint16) for bits in (old, new))
    return Changes(indices.numpy(), old_bits, new_bits)


class DevicePath:
    """The diff of weights on a device, in torch operations on this CPU; nothing crosses really.

    Args:
        resident: Whether the snapshot is on the device.
    """

    def __init__(self, *, resident: bool) -> None:
        self._resident = resident
        self._diff = DeviceDiff(torch.device("cpu"), fused=False)
        self._nnz = 0

    def __call__(self, snapshot: Bits, current: Bits) -> Changes:
        kept, now = (torch.from_numpy(bits.view(np.int16)) for bits in (snapshot, current))
        found: dict[str, Changes] = {}
        self._diff.add(Compared("", kept, 0, now, torch.int16, self._resident))
        self._diff.settle(found)
        self._nnz += found[""].indices.size
        return found[""]

    def per_change(self) -> tuple[float, float]:
        streams, nnz = self._diff.streams, max(1, self._nnz)
        return streams.to_device_nbytes / nnz, streams.to_host_nbytes / nnz


def measure(
    data: Data, rounds: int, paths: Mapping[str, DevicePath] = MappingProxyType({})
) -> Timings:
    from deltachain.kernels import jit  # noqa: PLC0415
    from tests.bench import floors  # noqa: PLC0415 - needs numba, as the next does

    kernels: dict[str, tuple[Kernel, npt.NDArray[Any]]] = {
        NUMBA: (jit.diff_, data.current),
        NUMPY: (twolevel.diff_, data.current),
        "numpy, naive": (reference.diff_, data.current),
        "torch, naive": (torch_naive, data.current),
        CAST_NUMBA: (jit.cast_diff_, data.master),
        "numpy cast_diff_": (twolevel.cast_diff_, data.master),
        **{name: (path, data.current) for name, path in paths.items()},
    }
    words, now, wide = (
        array.view(np.uint64) for array in (data.snapshot, data.current, data.master)
    )
    copy = np.empty_like(data.current)
    candidates = [
        Candidate(FLOOR, partial(floors.read_both, words, now), data.restore),
        Candidate(COPY, partial(np.copyto, copy, data.current)),
        Candidate(CAST_FLOOR, partial(floors.read_master, words, wide), data.restore),
    ]
    with one_core():
        for name, (kernel, source) in kernels.items():
            run = partial(kernel, data.snapshot, source)
            data.check(name, run)
            candidates.append(Candidate(name, run, data.restore))
        candidates += quantised_diff.candidates(data.master)
        return round_robin(candidates, rounds)


def rows(
    timings: Timings, numel: int, paths: Mapping[str, DevicePath] = MappingProxyType({})
) -> list[dict[str, Any]]:
    found = []
    for name in timings.seconds:
        there, back = paths[name].per_change() if name in paths else (0.0, 0.0)
        floor = baseline(name)
        row = report.speeds(name, timings, 2 * numel) | {
            "ratio": timings.ratio(name, floor),
            "paired_ratio": timings.paired_ratio(name, floor),
            "aim": AIMS[name][1] if name in AIMS else None,
            "threads": 1,
            "to_device_per_change": there,
            "to_host_per_change": back,
            "host_per_change": _on_host(name),
        }
        found.append(row)
    order = (FLOOR, CAST_FLOOR, *quantised_diff.FLOORS.values())
    return sorted(found, key=lambda row: (order.index(baseline(row["name"])), row["best_s"]))


def baseline(name: str) -> str:
    if name in quantised_diff.BASELINES:
        return quantised_diff.BASELINES[name]
    return CAST_FLOOR if "cast" in name or name == CAST_FLOOR else FLOOR


def _on_host(name: str) -> float:
    if name in PASSES:
        return 0.0
    return CODE_CHANGE_NBYTES if name in quantised_diff.BASELINES else CHANGE_NBYTES


def run(*, numel: int = NUMEL, density: float = DENSITY, rounds: int = ROUNDS) -> Mapping[str, Any]:
    if find_spec("numba") is None:
        raise ConfigError("this benchmark needs numba", hint="pip install 'deltachain[fast]'")
    say(f"{numel / 1e6:.0f} M elements, {density:.2%} changed")
    data = Data.generate(numel, density)
    paths = {DEVICE_HOST: DevicePath(resident=False), DEVICE: DevicePath(resident=True)}
    found = rows(measure(data, rounds, paths), numel, paths)
    return {
        "benchmark": "detect",
        "numel": data.current.size,
        "density": data.indices.size / data.current.size,
        "code_density": quantised_diff.CODE_DENSITY,
        "rounds": rounds,
        "threads": 1,
        "rows": found,
        "missed": [row["name"] for row in found if row["aim"] and row["ratio"] < row["aim"]],
        "machine": report.machine(),
    }


def main(*, json_output: bool) -> int:
    result = run()
    title = f"Find {result['density']:.2%} of {result['numel'] / 1e6:.0f} M bf16 elements"
    title += f", {result['code_density']:.2%} of codes"
    columns = ("best ms", "median ms", "GB/s", "of floor", "paired", "aim", "threads")
    table = report.grid(title, "", *columns)
    crossing = report.grid("Bytes a change", "", "to the device", "back", "on the host")
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
        )
        crossing.add_row(
            row["name"],
            f"{row['to_device_per_change']:.1f}",
            f"{row['to_host_per_change']:.1f}",
            f"{row['host_per_change']:.1f}",
        )
    report.emit(result, [table, crossing], json_output=json_output)
    return 1 if result["missed"] else 0
