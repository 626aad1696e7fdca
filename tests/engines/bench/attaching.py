"""``python -m tests.engines.bench.attaching``: time and memory to attach a stock vLLM.

A model is loaded, attached, and attached once more in a new process, with the proof that the first
kept. The floor is the engine's own load in the same process.
"""

# ruff: noqa: PLC0415 - spawned processes import this module, and vLLM must start without numba
import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final, NamedTuple

from tests.engines.bench.figures import ENVIRONMENT, Drawn

SIZES: Final = ("170M", "596M")
VERSIONS: Final = 3
DENSITY: Final = 0.01


class Attached(NamedTuple):
    """Seconds, and GiB of anonymous memory beside the loaded engine: at most, and afterwards."""

    load_s: float
    attach_s: float
    peak_gib: float
    after_gib: float
    update_s: tuple[float, ...]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.bench.attaching")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--sizes", default=",".join(SIZES), help="of models, by parameters")
    parser.add_argument("--versions", type=int, default=VERSIONS, help="to follow, 1 % each")
    parser.add_argument("--plain", action="store_true", help="pack nothing, as on an accelerator")
    asked = parser.parse_args()
    found = {size: _measure(size, asked.versions, asked.plain) for size in asked.sizes.split(",")}
    if asked.json:
        sys.stdout.write(json.dumps({n: [o._asdict() for o in ones] for n, ones in found.items()}))
        return 0
    sys.stdout.write("               load s  attach s  of load  peak GiB  after GiB  update s\n")
    for size, ones in found.items():
        for name, one in zip(("searched", "kept"), ones, strict=True):
            took, update = one.attach_s / one.load_s, sorted(one.update_s)[len(one.update_s) // 2]
            sys.stdout.write(
                f"{size:>5} {name:8} {one.load_s:6.1f} {one.attach_s:9.1f} {took:8.2f} "
                f"{one.peak_gib:9.2f} {one.after_gib:10.2f} {update:9.2f}\n"
            )
    return 0


def _measure(size: str, versions: int, plain: bool) -> list[Attached]:
    from tests.engines.bench.chains import draw

    with tempfile.TemporaryDirectory() as scratch:
        drawn = _alone(draw, size, Path(scratch), [DENSITY] * versions)
        return [_alone(attach, drawn, Path(scratch) / "spool", versions, plain) for _ in range(2)]


def attach(drawn: Drawn, spool: Path, versions: int, plain: bool) -> Attached:
    os.dup2(2, 1)  # vLLM's lines are no results
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "DELTACHAIN_SPOOL": str(spool)}
    os.environ.update({**ENVIRONMENT, **own})
    import vllm  # noqa: F401 - this import is no part of the load

    from tests.engines.vllm.bench_engine import loaded
    from tests.engines.vllm.fresh import unpacked_experts

    with unpacked_experts() if plain else nullcontext():
        return _attached(partial(loaded, drawn, plain=plain), drawn.url, versions)


def _attached(loaded: Callable[[], Any], url: str, versions: int) -> Attached:
    start = time.perf_counter()
    llm = loaded()
    load = time.perf_counter() - start
    import deltachain_vllm

    before, start = _anonymous_gib(), time.perf_counter()
    with _peak() as peak:
        subscriber = deltachain_vllm.subscribe(llm, url)
        subscriber.open()
        took = time.perf_counter() - start
    after = _anonymous_gib()
    updates = []
    for version in range((subscriber.version or 0) + 1, versions + 1):
        start = time.perf_counter()
        subscriber.update(version)
        updates.append(time.perf_counter() - start)
    return Attached(load, took, peak() - before, after - before, tuple(updates))


@contextmanager
def _peak() -> Iterator[Callable[[], float]]:
    highest, done = [_anonymous_gib()], Event()

    def watch() -> None:
        while not done.wait(0.02):
            highest[0] = max(highest[0], _anonymous_gib())

    watcher = Thread(target=watch)
    watcher.start()
    try:
        yield lambda: highest[0]
    finally:
        done.set()
        watcher.join()


def _anonymous_gib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 2**20 for line in lines if line.startswith("RssAnon"))


def _alone(function: Callable[..., Any], *arguments: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


if __name__ == "__main__":
    sys.exit(main())
