"""Where all ranks agree, at every call of ``publish``, whether they take a diff now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from deltachain.errors import RankError
from deltachain.publish.ranks.channel import Ranks
from deltachain.publish.ranks.collectives import together
from deltachain.types import Version


class Here(msgspec.Struct, frozen=True):
    """How a rank comes to a call of ``publish``."""

    free: bool


class Decision(msgspec.Struct, frozen=True):
    """Whether all ranks take a diff now, and the newest committed version."""

    go: bool
    head: Version = -1


class Meeting:
    """Meets the other ranks once a call; a call that some rank missed is no reason to miss more.

    A call is known by the trainer's step, so that only ranks at the same step meet, and one that
    missed a step is there again at the next. Where steps have no number, calls are counted: then a
    rank that missed one meets nobody any more.

    Args:
        ranks: All who publish.

    Attributes:
        topic: Of the last meeting: no other meeting has it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._call = ""
        self._again = 0
        self._seen: Counter[int | None] = Counter()
        self.topic = ""

    def call(self, step: int | None) -> None:
        """Another call of ``publish``, after a step of the trainer."""
        self._call, self._again = f"{step}.{self._seen[step]}", 0
        self._seen[step] += 1

    def meet(self, *, free: bool, settle: Callable[[], Version]) -> Decision:
        """What all ranks do now.

        Args:
            free: Whether this one can take a diff.
            settle: On the first rank: what the newest committed version is.

        Raises:
            RankError: Some rank did not come in time.
            DeltaChainError: ``settle`` failed.
        """
        # By the call: a rank that did not come to a flush is in step at the next one.
        self.topic = f"{self._call}.{self._again}"
        self._again += 1

        def conclude(all_here: list[Here]) -> Decision:
            go = all(here.free for here in all_here)
            return Decision(go=True, head=settle()) if go else Decision(go=False)

        kinds = (Here, Decision)
        topic = f"{self.topic}/meet"
        try:
            return together(self._ranks, topic, lambda: Here(free=free), conclude, kinds)
        except RankError as exc:
            exc.hint = f"{exc.hint}; every rank calls publish after the same steps"
            raise
