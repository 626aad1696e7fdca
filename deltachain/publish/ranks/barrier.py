"""Barrier at every call of ``publish``: all ranks take a diff at that step, or none does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from deltachain.errors import RankError
from deltachain.publish.ranks.channel import Ranks
from deltachain.publish.ranks.collectives import Collective
from deltachain.types import Version


class Decision(msgspec.Struct, frozen=True):
    """Decision for all ranks: whether to take a diff now, and the newest committed version."""

    go: bool
    head: Version = -1


class PublishBarrier:
    """Barrier for each call of ``publish``; a rank that misses one can join the next.

    A call is identified by the trainer's step, so only ranks at the same step meet. Without step
    numbers, calls are counted: a rank that misses one then never meets the others again.

    Args:
        ranks: All publishing ranks.

    Attributes:
        topic: Unique topic of the last barrier.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._call = ""
        self._again = 0
        self._seen: Counter[int | None] = Counter()
        self.topic = ""

    def call(self, step: int | None) -> None:
        """Begin another call of ``publish``, after a step of the trainer."""
        self._call, self._again = f"{step}.{self._seen[step]}", 0
        self._seen[step] += 1

    @contextmanager
    def meet(self) -> Iterator[Collective]:
        """Yield the collective in which the ranks decide at this call.

        Raises:
            RankError: A rank did not arrive in time.
        """
        # Named after the call: a rank that missed a flush can join the next one.
        self.topic = f"{self._call}.{self._again}"
        self._again += 1
        try:
            with Collective(self._ranks, f"{self.topic}/barrier") as collective:
                yield collective
        except RankError as exc:
            exc.hint = f"{exc.hint}; every rank calls publish after the same steps"
            raise
