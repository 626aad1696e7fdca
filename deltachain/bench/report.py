"""Output of benchmarks: tables, JSON and plots."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from deltachain.errors import ConfigError
from deltachain.kernels import host

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CAVEAT = "One core; the best of many repetitions, in turn. On a busy machine trust only the ratios."


def machine() -> dict[str, Any]:
    """Describe the machine and library versions."""
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
    """Print one JSON object, or the tables."""
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
    """Create a table with a column of names and columns of figures."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    return table


def axes(title: str) -> Axes:
    """Create an empty plot, without a display.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    return _plots(10, title)[0]


def two_axes(left: str, right: str) -> tuple[Axes, Axes]:
    """Create two empty plots side by side, by their titles.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    plots = _plots(15, left, right)
    from matplotlib import colormaps  # noqa: PLC0415 - an extra

    for plot in plots:
        plot.set_prop_cycle(color=colormaps["tab20"].resampled(20)(range(20)))
    return plots[0], plots[1]


def bars(path: Path, title: str, values: Mapping[str, float], unit: str) -> None:
    """Plot horizontal bars, from the top in the given order."""
    plot = axes(title)
    plot.barh(list(values), list(values.values()))
    plot.invert_yaxis()
    plot.set_xlabel(unit)
    save(plot, path)


def save(plot: Axes, path: Path) -> None:
    """Save the plot in the format of the file's suffix."""
    plot.get_figure(root=True).savefig(path, dpi=150)  # type: ignore[union-attr]


def _plots(width: float, *titles: str) -> list[Axes]:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ImportError as exc:
        raise ConfigError("--plot needs matplotlib", hint="pip install 'deltachain[plot]'") from exc
    figure = Figure(figsize=(width, 5), layout="constrained")
    plots = [
        figure.add_subplot(1, len(titles), number, title=title)
        for number, title in enumerate(titles, 1)
    ]
    for plot in plots:
        plot.grid(visible=True, alpha=0.3)
    return plots


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """Return the processor's name, from /proc/cpuinfo on Linux."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
