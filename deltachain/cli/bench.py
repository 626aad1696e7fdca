"""``deltachain bench``: sizes and speeds on this machine, as ratios of one run."""

# ruff: noqa: PLC0415 - dependencies are imported when the command runs
from __future__ import annotations

from enum import StrEnum, auto
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from deltachain.cli.options import AsJson
from deltachain.errors import ConfigError


class Subject(StrEnum):
    """Benchmarks."""

    CODEC = auto()
    DETECT = auto()
    APPLY = auto()
    ANCHOR = auto()
    STORE = auto()
    REACH = auto()


FLEET: Final = "Simulated fleet, for reach"
"""Panel of options in ``--help``."""


def bench(  # noqa: PLR0913 - one argument an option
    subject: Annotated[
        Subject,
        typer.Argument(
            metavar="SUBJECT",
            help="**codec**: bits per change, encode and decode speed, and the time to serve a "
            "version by the speed of the link, beside other systems' layouts; **detect**: finding "
            "changes; **apply**: writing changes; **anchor**: whole versions, from attaching to "
            "joining; **store**: puts and gets of objects; **reach**: requests, dollars and delays "
            "of a simulated fleet.",
        ),
    ],
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL]",
            help="For **store**: URL of an empty store. For **reach**: a store whose request times "
            "to take.",
        ),
    ] = None,
    *,
    mb: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="MB",
            help="Size of a version, for **store** (64 by default) and of a bf16 model, for "
            "**anchor** (256 by default).",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot the result to a PNG or SVG file.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="8b, 235b or 1t; all by default.", rich_help_panel=FLEET),
    ] = None,
    followers: Annotated[
        int | None, typer.Option(min=1, help="1,000 by default.", rich_help_panel=FLEET)
    ] = None,
    versions: Annotated[
        int | None, typer.Option(min=2, help="10,000 by default.", rich_help_panel=FLEET)
    ] = None,
    newcomers: Annotated[
        float | None,
        typer.Option(min=0, help="Newcomers an hour; 60 by default.", rich_help_panel=FLEET),
    ] = None,
    request_ms: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="MS",
            help="Time of a small request within a region, if no URL is given; 30 by default.",
            rich_help_panel=FLEET,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure sizes and speeds on this machine, relative to a baseline of the same run.

    Example: `deltachain bench codec --plot codec.svg`

    All figures, for a script: `deltachain bench codec --json`

    A store, cleaned up afterwards: `deltachain bench store s3://bucket/tmp --mb 256`

    A fleet whose requests take as long as from here: `deltachain bench reach s3://bucket/tmp`
    """
    from importlib import import_module

    fleet = {
        "model": model,
        "followers": followers,
        "versions": versions,
        "newcomers": newcomers,
        "request_ms": request_ms,
    }
    given = {name: value for name, value in fleet.items() if value is not None}
    if subject is Subject.REACH:
        raise typer.Exit(_reach(url, given, plot=plot, as_json=as_json))
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(
            f"{options}: only bench reach simulates a fleet", hint="leave it out, or run reach"
        )
    if subject is Subject.STORE:
        from deltachain.bench import store

        code = store.main(url, json_output=as_json, nbytes=(mb or 64) * 1_000_000, plot=plot)
        raise typer.Exit(code)
    if subject is Subject.ANCHOR:
        from deltachain.bench import anchor

        nbytes = mb * 1_000_000 if mb else anchor.NBYTES
        raise typer.Exit(anchor.main(json_output=as_json, nbytes=nbytes, plot=plot))

    measure = import_module(f"deltachain.bench.{subject.value}")
    raise typer.Exit(measure.main(json_output=as_json, plot=plot))


def _reach(url: str | None, given: dict[str, Any], *, plot: Path | None, as_json: bool) -> int:
    """Simulate a fleet with the given settings."""
    from deltachain.bench.reach.run import main, models_named
    from deltachain.bench.reach.settings import ReachConfig, RequestTimes

    request_ms = given.pop("request_ms", None)
    if request_ms is not None and url is not None:
        raise ConfigError(
            "--request-ms and a URL exclude each other", hint="a URL is measured: leave out one"
        )
    if request_ms is not None:
        given["requests"] = RequestTimes((request_ms / 1e3,))
    given["models"] = models_named(given.pop("model", ()))
    return main(url, ReachConfig(**given), json_output=as_json, plot=plot)
