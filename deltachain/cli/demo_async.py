"""``deltachain demo-async``."""

# ruff: noqa: PLC0415 - dependencies are imported when the command runs
from __future__ import annotations

import sys
import tempfile
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deltachain.cli import console as c
from deltachain.cli.options import AsJson
from deltachain.errors import ConfigError


class EngineChoice(StrEnum):
    """Inference engines."""

    VLLM = "vllm"
    SGLANG = "sglang"


def demo_async(  # noqa: PLR0913 - one argument an option
    *,
    engine: Annotated[EngineChoice, typer.Option(help="Inference engine.")] = EngineChoice.VLLM,
    engine_python: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The engine's Python. Default: **.venv-ENGINE/bin/python**."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Training steps.")] = 40,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of policy and games.")] = 0,
    workdir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep all files there. Default: a temporary folder."),
    ] = None,
    dashboard: Annotated[
        bool,
        typer.Option(
            "--dashboard",
            help="Show the run on a web page; its address, with a token, is printed.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a policy on a game with asynchronous GRPO, an inference engine and a bucket.

    Starts TRL's trainer, a stock vLLM or SGLang server as its replica, an S3 server between the
    two, and a game server for the rewards: four processes that share nothing else. Takes about ten
    minutes on two cores. Exits with 1 unless the reward rises and all bits are equal.

    Example: `deltachain demo-async --engine sglang --steps 20`

    With a web page of the run: `deltachain demo-async --dashboard`
    """
    from deltachain.demo.display import Display
    from deltachain.demo.online.run import RunOptions, run_online

    python = engine_python or Path(f".venv-{engine}/bin/python")
    if not python.exists():
        raise ConfigError(f"{python} does not exist", hint=f"create it with: make venv-{engine}")
    if workdir is not None and workdir.exists() and any(workdir.iterdir()):
        raise ConfigError(f"{workdir} is not empty", hint="choose an empty folder")
    console = Console(stderr=as_json)
    scratch = tempfile.TemporaryDirectory(prefix="deltachain-demo-")
    with nullcontext(str(workdir)) if workdir else scratch as root:
        report = run_online(
            RunOptions(
                root=Path(root).absolute(),
                kind=engine.value,
                python=python.absolute(),
                steps=steps,
                seed=seed,
                display=Display(console),
                at_step=lambda *_: None,
                dashboard=dashboard,
            )
        )
    if as_json:
        c.write_json(report.as_json())
    else:
        report.print(console)
    sys.stdout.flush()
    raise typer.Exit(0 if report.fine else 1)
