"""``deltachain bench``: sizes and speeds on this machine, as ratios of one run."""

# ruff: noqa: PLC0415 - dependencies are imported when the command runs
from __future__ import annotations

from enum import StrEnum, auto
from pathlib import Path
from typing import Annotated

import typer

from deltachain.cli.options import AsJson


class Subject(StrEnum):
    """Benchmarks."""

    CODEC = auto()
    DETECT = auto()
    APPLY = auto()
    ANCHOR = auto()
    STORE = auto()


def bench(
    subject: Annotated[
        Subject,
        typer.Argument(
            metavar="SUBJECT",
            help="**codec**: bits per change, encode and decode speed, and the time to serve a "
            "version by the speed of the link, beside other systems' layouts; **detect**: finding "
            "changes; **apply**: writing changes; **anchor**: whole versions, from attaching to "
            "joining; **store**: puts and gets of objects.",
        ),
    ],
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="For **store**: URL of an empty store.")
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
    as_json: AsJson = False,
) -> None:
    """Measure sizes and speeds on this machine, relative to a baseline of the same run.

    Example: `deltachain bench codec --plot codec.svg`

    All figures, for a script: `deltachain bench codec --json`

    A store, cleaned up afterwards: `deltachain bench store s3://bucket/tmp --mb 256`
    """
    from importlib import import_module

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
