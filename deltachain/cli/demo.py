"""``deltachain demo``."""

# ruff: noqa: PLC0415 - dependencies are imported when the command runs
from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltachain.cli.options import AsJson


def demo(
    *,
    workdir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep all files there. Default: a temporary folder."),
    ] = None,
    store: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help="**file**: a folder; **s3**: a local SeaweedFS server; **hf**: a local emulation "
            "of the Hub; or the **URL** of an empty store.",
        ),
    ] = "file",
    steps: Annotated[int, typer.Option(min=2, metavar="N", help="Training steps.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Train a small model while a second process follows it bit for bit.

    Takes minutes on a laptop and downloads nothing. Needs `pip install 'deltachain[trl]'`.

    Example: `deltachain demo --steps 10 --workdir demo`

    With a local S3 server: `deltachain demo --store s3`
    """
    from deltachain.demo.run import run_demo

    raise typer.Exit(run_demo(workdir=workdir, store=store, steps=steps, json_output=as_json))
