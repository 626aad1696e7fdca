"""The barrier at every call of ``publish``: all ranks take a diff now, or none does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from deltachain.errors import RankError
from deltachain.publish.ranks.channel import Ranks
from deltachain.publish.ranks.collectives import all_reduce
from deltachain.types import Version


class RankReady(msgspec.Struct, frozen=True):
    """Whether a rank can take a diff when it reaches the barrier."""

    free: bool


class Decision(msgspec.Struct, frozen=True):
    """The decision for all ranks: take a diff now or not, and the newest committed version."""

    go: bool
    head: Version = -1


class PublishBarrier:
    """A barrier for each call of ``publish``. A rank that misses one takes part in the next.

    A call is identified by the trainer's step, so only ranks at the same step meet. Where steps
    have no number, calls are counted: a rank that misses one then never meets the others again.

    Args:
        ranks: All ranks that publish.

    Attributes:
        topic: Of the last barrier; unique.
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

    def wait(self, *, free: bool, settle: Callable[[], Version]) -> Decision:
        """Wait for all ranks, and decide on rank 0.

        Args:
            free: Whether this rank can take a diff.
            settle: On rank 0: returns the newest committed version.

        Raises:
            RankError: A rank did not arrive in time.
            DeltaChainError: ``settle`` failed.
        """
        # Named by the call: a rank that missed a flush is in step at the next one.
        self.topic = f"{self._call}.{self._again}"
        self._again += 1

        def decide(all_ready: list[RankReady]) -> Decision:
            go = all(ready.free for ready in all_ready)
            return Decision(go=True, head=settle()) if go else Decision(go=False)

        kinds = (RankReady, Decision)
        topic = f"{self.topic}/barrier"
        try:
            return all_reduce(self._ranks, topic, lambda: RankReady(free=free), decide, kinds)
        except RankError as exc:
            exc.hint = f"{exc.hint}; every rank calls publish after the same steps"
            raise
