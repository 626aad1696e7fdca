"""Timing on a busy machine: candidates in turn, many rounds, the best of each.

Other processes only add time, so the minimum of many repetitions is the best estimate of the code
itself; the median shows the load of the machine. Compared candidates run in the same round, one
after another, so that load affects all of them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import torch

EVERY: Final = 5


def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    run: Callable[[], Any]
    prepare: Callable[[], Any] = _nothing


@dataclass(frozen=True, slots=True)
class Timings:
    seconds: Mapping[str, Sequence[float]]

    def best(self, name: str) -> float:
        return min(self.seconds[name])

    def typical(self, name: str) -> float:
        return median(self.seconds[name])

    def ratio(self, name: str, to: str) -> float:
        return self.best(to) / self.best(name)

    def paired_ratio(self, name: str, to: str) -> float:
        pairs = zip(self.seconds[to], self.seconds[name], strict=True)
        return median(other / own for other, own in pairs)


def round_robin(candidates: Sequence[Candidate], rounds: int) -> Timings:
    """Measure every candidate once a round, after a warm-up round.

    Every other round is in reverse order, so that after-effects of a candidate, such as disk
    writes, affect both neighbours.
    """
    seconds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for number in range(rounds + 1):
        if number % EVERY == 0:
            say(f"round {number} of {rounds}" if number else "warming up")
        for candidate in candidates if number % 2 else reversed(candidates):
            candidate.prepare()
            start = time.perf_counter()
            candidate.run()
            elapsed = time.perf_counter() - start
            if number:
                seconds[candidate.name].append(elapsed)
    return Timings(seconds)


@contextmanager
def one_core() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if allowed:
        os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        if allowed:
            os.sched_setaffinity(0, allowed)
        torch.set_num_threads(threads)


def say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
