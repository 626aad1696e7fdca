"""Output of benchmarks: tables and JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deltachain.kernels import host
from tests.bench.timing import Timings

CAVEAT = "One core; the best of many repetitions, in turn. On a busy machine trust only the ratios."


def machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "kernels": host.NAME,
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
