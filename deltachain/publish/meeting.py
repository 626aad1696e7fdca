"""Where all ranks agree, at every call of ``publish``, whether they take a diff now."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from deltachain.errors import ConfigError
from deltachain.publish.ranks import Ranks
from deltachain.publish.together import together
from deltachain.types import Version


class Here(msgspec.Struct, frozen=True):
    """Where a rank is when it calls ``publish``."""

    free: bool
    step: int | None
    calls: int


class Verdict(msgspec.Struct, frozen=True):
    """Whether all ranks take a diff now, and the newest committed version."""

    go: bool
    head: Version = -1


class Meeting:
    """Meets the other ranks once a call; a call that some rank missed is no reason to miss more.

    Args:
        ranks: All who publish.

    Attributes:
        topic: Of the last meeting: no other meeting has it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._calls = self._again = 0
        self.topic = ""

    def call(self) -> None:
        """Another call of ``publish``."""
        self._calls, self._again = self._calls + 1, 0

    def meet(self, *, free: bool, step: int | None, settle: Callable[[], Version]) -> Verdict:
        """What all ranks do now.

        Args:
            free: Whether this one can take a diff.
            step: Its trainer's.
            settle: On the first rank: what the newest committed version is.

        Raises:
            ConfigError: Ranks publish different steps.
            RankError: Some rank did not come in time.
            DeltaChainError: ``settle`` failed.
        """
        # By the number of the call: a rank that did not come to a flush is in step at the next one.
        self.topic = f"{self._calls}.{self._again}"
        self._again += 1
        here = Here(free=free, step=step, calls=self._calls)

        def conclude(all_here: list[Here]) -> Verdict:
            return Verdict(go=True, head=settle()) if _may_go(all_here) else Verdict(go=False)

        kinds = (Here, Verdict)
        return together(self._ranks, f"{self.topic}/meet", lambda: here, conclude, kinds)


def _may_go(all_here: Sequence[Here]) -> bool:
    """Whether every rank can take its diff, of the same step.

    Raises:
        ConfigError: They would be of different ones.
    """
    if not all(here.free for here in all_here):
        return False
    steps = [here.step for here in all_here]
    if len(set(steps)) > 1:
        raise ConfigError(
            f"ranks publish different steps: {steps}",
            hint="every rank calls publish after the same steps",
        )
    return True
