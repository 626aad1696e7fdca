"""``deltachain bench``: sizes and speeds on this machine, as ratios taken in one run."""

# ruff: noqa: PLC0415 - what a command needs is imported when it runs
from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deltachain.cli.options import AsJson


class Subject(StrEnum):
    """What is measured."""

    CODEC = "codec"
    DETECT = "detect"
    APPLY = "apply"
    STORE = "store"


def bench(
    subject: Annotated[
        Subject,
        typer.Argument(
            help="**codec**: bits a change and encode, decode speed; **detect**: finding changes; "
            "**apply**: writing them; **store**: putting and getting objects.",
        ),
    ],
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="For **store**: which one.")
    ] = None,
    *,
    mb: Annotated[
        int, typer.Option(min=1, metavar="MB", help="For **store**: size of the version.")
    ] = 64,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the result, as PNG or SVG.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure sizes and speeds on this machine, next to a floor measured in the same run.

    Example: `deltachain bench codec --plot codec.svg`

    A store, emptied again afterwards: `deltachain bench store s3://bucket/tmp --mb 256`
    """
    from importlib import import_module

    if subject is Subject.STORE:
        from deltachain.bench import store

        code = store.main(url, json_output=as_json, nbytes=mb * 1_000_000, plot=plot)
        raise typer.Exit(code)

    measure = import_module(f"deltachain.bench.{subject.value}")
    raise typer.Exit(measure.main(json_output=as_json, plot=plot))
