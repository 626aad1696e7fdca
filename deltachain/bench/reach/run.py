"""``deltachain bench reach``: simulate models one after another, and show the figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from deltachain.bench import report
from deltachain.bench.reach import figures, request_times
from deltachain.bench.reach.fleet import SimulatedFleet
from deltachain.bench.reach.growth import Growth
from deltachain.bench.reach.mirror_calls import MirrorCalls, count_mirror_calls
from deltachain.bench.reach.settings import MODELS, ModelSize, ReachConfig, RequestTimes
from deltachain.bench.timing import say
from deltachain.errors import ConfigError
from deltachain.types import Version

CAVEAT: Final = "Simulated; what it rests on is above."

PROGRESS: Final = 2500
"""Versions between two lines of progress."""


def run(
    config: ReachConfig, calls: MirrorCalls, progress: Callable[[str], None] = say
) -> Mapping[str, Any]:
    """Simulate every model; return all figures for JSON.

    Args:
        config: Settings.
        calls: Requests of a mirror.
        progress: Called with a line now and then.
    """
    start = time.perf_counter()
    rows = []
    for model in config.models:

        def grown(version: Version, model: ModelSize = model) -> None:
            if version % PROGRESS == 0:
                progress(f"{model.name}: version {version:,} of {config.versions:,}")

        chain = Growth(config, model).run(grown)
        progress(f"{model.name}: {config.followers:,} followers")
        seen = SimulatedFleet(config, model, chain.moments, calls).run()
        rows.append(figures.of_model(config, model, chain, seen))
    return {
        "benchmark": "reach",
        "settings": config.as_json(),
        "assumptions": config.assumptions(),
        "models": rows,
        "seconds": time.perf_counter() - start,
        "machine": report.machine(),
    }


def models_named(names: Sequence[str]) -> tuple[ModelSize, ...]:
    """Return models by name; all without a name.

    Raises:
        ConfigError: There is no such model.
    """
    known = {model.name: model for model in MODELS}
    wrong = [name for name in names if name.lower() not in known]
    if wrong:
        raise ConfigError(f"unknown model {wrong[0]!r}", hint=f"one of {', '.join(known)}")
    return tuple(known[name.lower()] for name in names) or MODELS


def main(
    url: str | None, config: ReachConfig, *, json_output: bool, plot: Path | None = None
) -> int:
    """Run ``deltachain bench reach``; return 0.

    Args:
        url: URL of a store whose request times to take; ``None`` for those of ``config``.
        config: Settings.
        json_output: Whether to print JSON.
        plot: File of a plot.
    """
    if url is not None:
        say(f"measuring {request_times.COUNT} requests to {url}")
        times: RequestTimes = request_times.measure(url)
        config = replace(config, requests=times)
    say("counting the requests of a mirror")
    result = run(config, count_mirror_calls())
    report.emit(result, tables(result), json_output=json_output, caveat=CAVEAT)
    if plot is not None:
        draw(result, plot)
    return 0


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Return the assumptions and the figures as tables."""
    settings = result["settings"]
    fleet = f"{settings['followers']:,} followers in {settings['regions']} regions"
    resting = report.grid("What this rests on", "")
    for line in result["assumptions"]:
        resting.add_row(line)
    title = f"{fleet}: traffic a step"
    columns = ("step s", "delta", "requests", "a second", "egress", "of it to mirrors")
    traffic = report.grid(title, "", *columns)
    delays = report.grid(
        "Seconds from a commit until a follower has it",
        *("", "median", "p99", "median of the first region", "of those with mirrors"),
    )
    anchors = report.grid(
        "Anchors, which a mirror copies before it goes on",
        *("", "bytes", "versions between two", "seconds of a copy"),
    )
    joins = report.grid(
        f"{settings['newcomers']:g} newcomers an hour",
        *("", "edges", "requests", "bytes", "median s", "p99 s", "most an hour"),
    )
    for row in result["models"]:
        asked, egress = row["requests_a_step"], row["egress_nbytes_a_step"]
        traffic.add_row(
            row["model"],
            f"{row['step_s']:g}",
            _bytes(row["delta_nbytes"]),
            f"{asked['reads'] + asked['writes']:,.0f}",
            f"{row['requests_a_second']:,.0f}",
            _bytes(egress["all"]),
            _bytes(egress["mirrors"]),
        )
        regions = [_seconds(region["median"]) for region in row["follower_s_by_region"]]
        delays.add_row(
            row["model"],
            _seconds(row["follower_s"]["median"]),
            _seconds(row["follower_s"]["p99"]),
            regions[0],
            ", ".join(regions[1:]),
        )
        anchor, new = row["anchor"], row["newcomer"]
        anchors.add_row(
            row["model"],
            _bytes(anchor["nbytes"]),
            f"{anchor['versions']:.0f}",
            _seconds(anchor["copy_s"]),
        )
        joins.add_row(
            row["model"],
            f"{new['edges']:g}",
            f"{new['requests']:,.0f}",
            _bytes(new["nbytes"]),
            _seconds(new["seconds"]["median"]),
            _seconds(new["seconds"]["p99"]),
            f"{new['most_an_hour']:,}",
        )
    return [resting, traffic, _prices(result["models"]), delays, anchors, joins]


def _prices(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the dollars by model and provider."""
    table = report.grid(
        "Dollars at public list prices",
        *("", "provider", "a step, elsewhere", "a step, in the regions", "a month of storage"),
    )
    for row in rows:
        for price in row["dollars"]:
            keys = ("step_elsewhere", "step_in_regions", "storage_month")
            cells = (f"{price[key]:,.4f}" for key in keys)
            table.add_row(row["model"], price["provider"], *cells)
    return table


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Plot delays by share of the followers, and dollars a step by provider."""
    left, right = report.two_axes(
        "Seconds from a commit until a share of the followers has it", "Dollars a step"
    )
    labels, heights = [], []
    for number, row in enumerate(result["models"]):
        for region, seconds in enumerate(row["follower_s_percentiles"]):
            label = f"{row['model']}, region {region + 1}"
            style = ("-", "--", ":")[min(region, 2)]
            left.plot(
                seconds, range(1, len(seconds) + 1), style, color=f"C{2 * number}", label=label
            )
        for price in row["dollars"]:
            labels.append(f"{row['model']} {price['provider']}")
            heights.append((price["step_elsewhere"], price["step_in_regions"]))
    left.set_xscale("log")
    left.set_xlabel("seconds")
    left.set_ylabel("% of the followers")
    left.legend(fontsize="small")
    places = range(len(labels))
    right.barh([at - 0.2 for at in places], [one for one, _ in heights], 0.4, label="elsewhere")
    right.barh(
        [at + 0.2 for at in places], [two for _, two in heights], 0.4, label="in the regions"
    )
    right.set_yticks(list(places), labels)
    right.invert_yaxis()
    right.set_xscale("symlog", linthresh=0.001)
    right.set_xlabel("dollars")
    right.legend(fontsize="small")
    report.save(left, path)


def _bytes(nbytes: float) -> str:
    """Format bytes in units of a thousand."""
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.3g} TB" if nbytes < 1000 else f"{nbytes:,.0f} TB"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:,.2f}"
