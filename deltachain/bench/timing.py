"""Timing that survives a busy machine: candidates in turn, many rounds, the best of each.

Other work on a machine only ever adds time, so the smallest of many repetitions is the best
estimate of what the code itself takes; the median says how busy the machine was. What is compared
runs in the same round, one after another, so that a slow minute hits all of it.
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
"""Rounds between two lines of progress."""


def _nothing() -> None:
    """Nothing to prepare."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something to time.

    Attributes:
        name: For the table.
        run: What is timed.
        prepare: Runs before each repetition, outside the timing.
    """

    name: str
    run: Callable[[], Any]
    prepare: Callable[[], Any] = _nothing


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of every candidate, one entry a round."""

    seconds: Mapping[str, Sequence[float]]

    def best(self, name: str) -> float:
        """The smallest."""
        return min(self.seconds[name])

    def typical(self, name: str) -> float:
        """The median."""
        return median(self.seconds[name])

    def ratio(self, name: str, to: str) -> float:
        """How many times as fast as ``to``: the best of both."""
        return self.best(to) / self.best(name)

    def paired_ratio(self, name: str, to: str) -> float:
        """The median over rounds of how many times as fast as ``to`` it was in that round."""
        pairs = zip(self.seconds[to], self.seconds[name], strict=True)
        return median(other / own for other, own in pairs)


def round_robin(candidates: Sequence[Candidate], rounds: int) -> Timings:
    """Time every candidate once a round, after one round that does not count.

    Every other round goes backwards: what one candidate leaves behind, such as bytes that a disk
    has yet to take, then falls on each neighbour in turn.
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
    """Keep this process and its thread pools on one core, where the system can do that."""
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
    """Progress, which is not a result."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
