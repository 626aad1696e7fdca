"""The figures as tables, as one JSON object, and as an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from statistics import median, quantiles
from typing import Any, Final

from rich.table import Table

from tests.bench import report
from tests.bench.report import Timings
from tests.engines.bench.figures import (
    FLOOR,
    LOAD,
    PATCHES,
    PAUSE,
    RELOAD,
    ROWS,
    SWAP,
    Applied,
    Drawn,
    Lost,
)
from tests.engines.serving import ENGINE

AIM: Final = 2.0
"""Most time that a swap in place may take, in times of bare writes."""

CAVEAT: Final = "Candidates in turn, in one process; best (median). On a busy machine trust ratios."

Case = tuple[Drawn, Applied]


def show(
    applied: Sequence[Case], lost: tuple[Drawn, Sequence[Lost]] | None, *, json_output: bool
) -> int:
    everything = [one for _, one in applied] + list(lost[1] if lost else ())
    if not all(one.proven for one in everything):
        raise ArithmeticError("a live model does not hold what its chain says")
    slow = [
        f"{drawn.size} at {density:.1%}"
        for drawn, one in applied
        for density, timings in timings_of(drawn, one).items()
        if one.plain and 1 / timings.ratio(SWAP, FLOOR) > AIM
    ]
    document = {
        "benchmark": ENGINE,
        "applied": [_plain(drawn) | asdict(one) for drawn, one in applied],
        "lost": [_plain(lost[0]) | asdict(one) for one in lost[1]] if lost else [],
        "aim_times_bare": AIM,
        "missed": slow,
        "machine": report.machine() | {ENGINE: version(ENGINE)},
    }
    tables = [_applied(drawn, one) for drawn, one in applied]
    if lost:
        tables.append(_lost(*lost))
    report.emit(document, tables, json_output=json_output, caveat=CAVEAT)
    return 1 if slow else 0


def timings_of(drawn: Drawn, applied: Applied) -> dict[float, Timings]:
    found: dict[float, dict[str, list[float]]] = {}
    for number, seconds in applied.seconds.items():
        rows = found.setdefault(drawn.densities[number - 1], {})
        for name, taken in seconds.items():
            rows.setdefault(name, []).append(taken)
    return {density: Timings(rows) for density, rows in sorted(found.items())}


def _applied(drawn: Drawn, applied: Applied) -> Table:
    timings = timings_of(drawn, applied)
    changes = {density: _changes(drawn, density) for density in timings}
    kind = "in place" if applied.plain else "stock: all but norms reloaded"
    title = (
        f"{drawn.size}, {kind} (attach {applied.attach_s:.1f} s, "
        f"at most {applied.peak_mb / 1e3:.1f} GB)"
    )
    table = report.grid(title, "ms an update", *(f"{density:.1%}" for density in timings))
    table.add_row("changes, M", *(f"{nnz / 1e6:.2f}" for nnz in changes.values()))
    for name, label in ROWS.items():
        if all(name in rows.seconds for rows in timings.values()):
            table.add_row(label, *(_best_and_median(rows, name) for rows in timings.values()))
    table.add_row(
        "swap, ns a change",
        *(f"{rows.best(SWAP) / changes[d] * 1e9:.1f}" for d, rows in timings.items()),
    )
    for name, of, label in (
        (SWAP, FLOOR, "swap, times index_copy_"),
        (PAUSE, LOAD, "pause, times load_weights"),
        (PAUSE, RELOAD, "pause, times layerwise reload"),
        (PAUSE, PATCHES, "pause, times checkpoint patches"),
    ):
        if all(of in rows.seconds for rows in timings.values()) and (applied.plain or of == RELOAD):
            table.add_row(label, *(f"{1 / rows.ratio(name, of):.2f}" for rows in timings.values()))
    return table


def _lost(drawn: Drawn, lost: Sequence[Lost]) -> Table:
    title = f"{drawn.size} at {drawn.densities[-1]:.1%}: generation lost to one update"
    table = report.grid(title, "", *(f"engine in {one.threads} threads" for one in lost))
    for label, cells in (
        ("tokens a second, quiet", [f"{median(one.rates):.0f}" for one in lost]),
        ("lost to staging, ms", [_spread(one.staging_s) for one in lost]),
        ("lost to the update, ms", [_spread(one.updating_s) for one in lost]),
        ("lost, cached prefixes kept, ms", [_spread(one.keeping_s) for one in lost]),
        ("stage, ms", [_spread(one.stage_s) for one in lost]),
        ("swap, ms", [_spread(one.swap_s) for one in lost]),
        ("pause, ms", [_spread(one.pause_s) for one in lost]),
    ):
        table.add_row(label, *cells)
    return table


def _changes(drawn: Drawn, density: float) -> float:
    return median(nnz for nnz, d in zip(drawn.nnz, drawn.densities, strict=True) if d == density)


def _best_and_median(rows: Timings, name: str) -> str:
    return f"{_short(rows.best(name))} ({_short(rows.typical(name))})"


def _spread(seconds: Sequence[float]) -> str:
    first, middle, third = quantiles(seconds, n=4) if len(seconds) > 1 else 3 * list(seconds)
    return f"{_short(middle)} ({_short(first)} to {_short(third)})"


def _short(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.2f}" if abs(ms) < 10 else f"{ms:.0f}"


def _plain(drawn: Drawn) -> dict[str, Any]:
    return {k: v for k, v in asdict(drawn).items() if k not in ("base", "url")}
