"""Output of benchmarks: tables and JSON."""

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

EVERY: Final = 5


def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    run: Callable[[], Any]
    prepare: Callable[[], Any] = _nothing


@dataclass(frozen=True, slots=True)
class Timings:
    seconds: Mapping[str, Sequence[float]]

    def best(self, name: str) -> float:
        return min(self.seconds[name])

    def typical(self, name: str) -> float:
        return median(self.seconds[name])

    def ratio(self, name: str, to: str) -> float:
        return self.best(to) / self.best(name)

    def paired_ratio(self, name: str, to: str) -> float:
        pairs = zip(self.seconds[to], self.seconds[name], strict=True)
        return median(other / own for other, own in pairs)


def round_robin(candidates: Sequence[Candidate], rounds: int) -> Timings:
    """Measure every candidate once a round, after a warm-up round.

    Every other round is in reverse order, so that after-effects of a candidate, such as disk
    writes, affect both neighbours.
    """
    seconds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for number in range(rounds + 1):
        if number % EVERY == 0:
            say(f"round {number} of {rounds}" if number else "warming up")
        for candidate in candidates if number % 2 else reversed(candidates):
            candidate.prepare()
            start = time.perf_counter()
            candidate.run()
            elapsed = time.perf_counter() - start
            if number:
                seconds[candidate.name].append(elapsed)
    return Timings(seconds)


@contextmanager
def one_core() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if allowed:
        os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        if allowed:
            os.sched_setaffinity(0, allowed)
        torch.set_num_threads(threads)


def say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


CAVEAT = "One core; the best of many repetitions, in turn. On a busy machine trust only the ratios."


def machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "versions": {name: _version(name) for name in ("numpy", "numba", "torch", "zstandard")},
    }


def emit(
    document: Mapping[str, Any],
    tables: Sequence[Table],
    *,
    json_output: bool,
    caveat: str = CAVEAT,
) -> None:
    if json_output:
        sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")
        return
    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 140
    for table in tables:
        console.print(table)
    console.print(f"{machine()['processor']}. {caveat}", style="dim")


def grid(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    return table


def speeds(name: str, timings: Timings, nbytes: int) -> dict[str, Any]:
    """Figures that every row has; throughput by the best time, in 10^9 bytes a second."""
    return {
        "name": name,
        "best_s": timings.best(name),
        "median_s": timings.typical(name),
        "gb_per_s": nbytes / timings.best(name) / 1e9,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
