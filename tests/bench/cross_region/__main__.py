"""``python -m tests.bench.cross_region``: make a network, measure on it, print."""

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from deltachain.errors import DeltaChainError
from tests.bench import report
from tests.bench.cross_region.measure import (
    WARM_UP,
    Sample,
    document,
    measure,
    opened,
    rows,
    tables,
)
from tests.bench.cross_region.network import REPLICAS, STORE, TRAINER, check_host, network
from tests.bench.cross_region.roles import WAYS, Scene, make_scene

CAVEAT: Final = (
    "One machine for all: trainer, store and replicas share its cores. Seconds from the end of "
    "optimizer.step."
)


def run(
    *, parameters: int, versions: int, density: float, poll_s: float, ways: tuple[str, ...] = WAYS
) -> tuple[dict[str, list[Sample]], dict[str, Any]]:
    check_host()
    with tempfile.TemporaryDirectory(prefix="deltachain-regions-") as name:
        folder = Path(name)
        steps = WARM_UP + versions
        scene = make_scene(folder, parameters=parameters, versions=steps, density=density)
        settings = {
            "parameters": scene.numel,
            "versions": versions,
            "density": _density(scene, steps),
            "poll_s": poll_s,
        }
        with (
            network((TRAINER, STORE, *REPLICAS)) as made,
            opened(made, scene, folder, poll_s=poll_s) as running,
        ):
            return measure(running, ways, versions=versions), settings


def main(arguments: list[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)  # as Ctrl-C: the namespaces go with it
    try:
        samples, settings = run(
            parameters=round(asked.parameters * 1e6),
            versions=asked.versions,
            density=asked.density,
            poll_s=asked.poll_ms / 1000,
            ways=tuple(asked.way or WAYS),
        )
    except DeltaChainError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return exc.exit_code
    except KeyboardInterrupt:
        return 130
    title = (
        f"{settings['parameters'] / 1e6:.0f} M parameters, {settings['density']:.2%} changed, "
        f"{settings['versions']} versions"
    )
    found = document(samples, settings)
    made = tables(samples)
    report.emit(found, made, json_output=asked.json, caveat=f"{title}. {CAVEAT}")
    return 1 if any(row["mismatches"] for row in rows(samples)) else 0


def _density(scene: Scene, versions: int) -> float:
    changed = [scene.change(number).bits.size for number in range(1, versions + 1)]
    return sum(changed) / versions / scene.numel


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.cross_region", description=__doc__)
    parser.add_argument("--parameters", type=_positive, default=60.0, help="of the model, millions")
    parser.add_argument("--versions", type=int, choices=range(1, 1000), metavar="N", default=12)
    parser.add_argument("--density", type=_positive, default=0.01, help="share that a step changes")
    parser.add_argument(
        "--poll-ms", type=_positive, default=50.0, help="between looks, of all ways"
    )
    parser.add_argument("--way", action="append", choices=WAYS, help="one or more; default: all")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a positive number")
    return value


def _end(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
