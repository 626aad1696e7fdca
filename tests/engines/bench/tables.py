"""The figures as tables, as one JSON object, and as an exit code."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from math import inf
from statistics import median
from typing import Any, Final

from rich.table import Table

from tests.bench import report
from tests.bench.report import Timings
from tests.engines.bench.figures import (
    FLOOR,
    KEPT,
    PAUSE,
    RELOAD,
    ROWS,
    SALTED,
    SWAP,
    WAYS,
    Applied,
    Drawn,
    Lost,
)
from tests.engines.serving import ENGINE

AIM: Final = 2.0
"""Most time that a swap in place may take, in times of bare writes."""

LOST_AIM: Final = 1.3
"""Most generation lost to an update with caches by version, in times of that with all kept."""

CAVEAT: Final = "Candidates in turn, in one process; medians. On a busy machine trust ratios."

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
    slow += [f"caches {SALTED}" for one in lost[1] if _ratio(one) > LOST_AIM] if lost else []
    document = {
        "benchmark": ENGINE,
        "applied": [_plain(drawn) | asdict(one) for drawn, one in applied],
        "lost": [_plain(lost[0]) | asdict(one) for one in lost[1]] if lost else [],
        "missed": slow,
        "machine": report.machine() | {ENGINE: version(ENGINE)},
    }
    tables = [_applied(drawn, one) for drawn, one in applied] + ([_lost(*lost)] if lost else [])
    report.emit(document, tables, json_output=json_output, caveat=CAVEAT)
    return 1 if slow else 0


def timings_of(drawn: Drawn, applied: Applied) -> dict[float, Timings]:
    found: dict[float, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, seconds in applied.seconds.items():
        for name, taken in seconds.items():
            found[drawn.densities[number - 1]][name].append(taken)
    return {density: Timings(rows) for density, rows in sorted(found.items())}


def _applied(drawn: Drawn, applied: Applied) -> Table:
    timings = timings_of(drawn, applied)
    kind = "in place" if applied.plain else "stock: all but norms reloaded"
    table = report.grid(f"{drawn.size}, {kind}", "ms", *(f"{density:.1%}" for density in timings))
    for name, label in ROWS.items():
        if all(name in rows.seconds for rows in timings.values()):
            table.add_row(label, *(_ms(rows.typical(name)) for rows in timings.values()))
    name, of = (SWAP, FLOOR) if applied.plain else (PAUSE, RELOAD)
    ratios = (f"{1 / rows.ratio(name, of):.2f}" for rows in timings.values())
    table.add_row(f"{name}, times {of}", *ratios)
    return table


def _lost(drawn: Drawn, lost: Sequence[Lost]) -> Table:
    title = f"{drawn.size} at {drawn.densities[-1]:.1%}: generation lost to one update, ms"
    table = report.grid(title, "", *(f"engine in {one.threads} threads" for one in lost))
    for label, name in (
        ("lost to staging", "staging_s"),
        ("pause", "pause_s"),
    ):
        table.add_row(label, *(_ms(median(getattr(one, name))) for one in lost))
    for way in WAYS:
        table.add_row(f"caches {way}", *(_ms(median(one.updates_s[way])) for one in lost))
    table.add_row(f"{SALTED}, times {KEPT}", *(f"{_ratio(one):.2f}" for one in lost))
    return table


def _ratio(lost: Lost) -> float:
    kept_s = median(lost.updates_s[KEPT])
    return median(lost.updates_s[SALTED]) / kept_s if kept_s > 0 else inf  # noise decides nothing


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.2f}" if abs(ms) < 10 else f"{ms:.0f}"


def _plain(drawn: Drawn) -> dict[str, Any]:
    return {k: v for k, v in asdict(drawn).items() if k not in ("base", "url")}
