"""Train a policy on a game with asynchronous GRPO, an inference engine and a bucket.

Starts TRL's trainer, a stock vLLM or SGLang server as its replica, an S3 server between the two,
and a game server for the rewards: four processes that share nothing else. Takes about ten minutes
on two cores. Exits with 1 unless the reward rises and all bits are equal.
"""

import argparse
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from deltachain.cli.console import say_error
from deltachain.errors import ConfigError, DeltaChainError
from examples.demo.online.report import OnlineReport
from examples.demo.online.run import STEPS, RunOptions, run_online
from examples.demo.report import Display


def main() -> int:
    asked = _parser().parse_args()
    console = Console(stderr=asked.json)
    try:
        report = _run(asked, console)
    except DeltaChainError as error:
        say_error(error)
        return error.exit_code
    if asked.json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    else:
        report.print(console)
    return 0 if report.fine else 1


def _run(asked: argparse.Namespace, console: Console) -> OnlineReport:
    python = asked.engine_python or Path(f".venv-{asked.engine}/bin/python")
    workdir: Path | None = asked.workdir
    if not python.exists():
        raise ConfigError(
            f"{python} does not exist", hint=f"create it with: make venv-{asked.engine}"
        )
    if workdir is not None and workdir.exists() and any(workdir.iterdir()):
        raise ConfigError(f"{workdir} is not empty", hint="choose an empty folder")
    scratch = tempfile.TemporaryDirectory(prefix="deltachain-demo-")
    with nullcontext(str(workdir)) if workdir else scratch as root:
        return run_online(
            RunOptions(
                root=Path(root).absolute(),
                kind=asked.engine,
                python=python.absolute(),
                steps=asked.steps,
                seed=asked.seed,
                display=Display(console),
                at_step=lambda *_: None,
                dashboard=asked.dashboard,
            )
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.demo.online", description=__doc__)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument(
        "--engine-python",
        type=Path,
        metavar="FILE",
        help="the engine's Python; .venv-ENGINE/bin/python by default",
    )
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help="training steps")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of policy and games")
    parser.add_argument(
        "--workdir", type=Path, metavar="DIR", help="keep all files there; else a temporary folder"
    )
    parser.add_argument(
        "--dashboard",
        action="store_true",
        help="show the run on a web page; its address, with a token, is printed",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
