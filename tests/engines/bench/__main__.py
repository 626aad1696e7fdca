"""``python -m tests.engines.bench``: every figure, as tables or as one JSON object.

Each model is drawn, loaded and measured in processes of its own, so that one's memory is gone
before the next is loaded.
"""

# ruff: noqa: PLC0415 - spawned processes import this module, and must not load numba by it
import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar

from tests.engines.bench.figures import WAYS, Applied, Drawn, Lost
from tests.engines.serving import ENGINE

SIZES: Final = ("19M", "170M", "596M")
DENSITIES: Final = (0.001, 0.01, 0.05)
ROUNDS: Final = 6
LOST_SIZE: Final = "170M"
LOST_DENSITY: Final = 0.01
LOST_WINDOWS: Final = 12
LOST_TIMES: Final = 2

_T = TypeVar("_T")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.bench")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--sizes", default=",".join(SIZES), help="of models, by parameters")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="updates of each density")
    parser.add_argument("--windows", type=int, default=LOST_WINDOWS, help="0: lose no generation")
    parser.add_argument("--lost-size", default=LOST_SIZE, help="of the model that generates")
    asked = parser.parse_args()
    sizes = [size for size in asked.sizes.split(",") if size]
    applied = [one for size in sizes for one in _apply(size, asked.rounds)]
    lost = _lose(asked.lost_size, asked.windows) if asked.windows else None

    from tests.engines.bench.tables import show

    return show(applied, lost, json_output=asked.json)


def _apply(size: str, rounds: int) -> list[tuple[Drawn, Applied]]:
    from tests.engines.bench.chains import draw

    measure = import_module(f"tests.engines.{ENGINE}.bench_engine").measure_updates
    densities = DENSITIES * (rounds + 1)  # the first round does not count
    with tempfile.TemporaryDirectory() as scratch:
        drawn = _alone(draw, size, Path(scratch), densities)
        return [
            (drawn, _alone(measure, drawn, plain=plain, warm_up=len(DENSITIES)))
            for plain in ((True, False) if ENGINE == "vllm" else (True,))
        ]


def _lose(size: str, windows: int) -> tuple[Drawn, list[Lost]]:
    """Follow one chain while generating on all cores but one, which staging then has."""
    from tests.engines.bench.chains import draw

    measure = import_module(f"tests.engines.{ENGINE}.bench_engine").measure_losses
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        drawn = _alone(
            draw, size, folder, [LOST_DENSITY] * (len(WAYS) * LOST_TIMES * (1 + windows))
        )
        spool = folder / "spool"
        threads = max(1, multiprocessing.cpu_count() - 1)
        found = _alone(measure, drawn, spool, threads=threads, times=LOST_TIMES)
        return drawn, [found]


def _alone(function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args, **kwargs).result()


if __name__ == "__main__":
    sys.exit(main())
