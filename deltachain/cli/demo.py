"""``deltachain demo``."""

# ruff: noqa: PLC0415 - what a command needs is imported when it runs
from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltachain.cli.options import AsJson


def demo(
    *,
    workdir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep everything there; else it is thrown away."),
    ] = None,
    store: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help="**file**: a folder; **s3**: a SeaweedFS started here; **hf**: an emulated Hub "
            "started here; else the **URL** of an empty place.",
        ),
    ] = "file",
    steps: Annotated[
        int, typer.Option(min=2, metavar="N", help="Training steps; one to roll back to.")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """Train a small model here, and watch a second process follow it bit for bit.

    Takes minutes on a laptop and downloads nothing. Needs the extra `trl`.

    Example: `deltachain demo --steps 10 --workdir demo`

    On a real S3 server, started here: `deltachain demo --store s3`
    """
    from deltachain.demo.run import run_demo

    raise typer.Exit(run_demo(workdir=workdir, store=store, steps=steps, json_output=as_json))
