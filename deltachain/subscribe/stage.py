"""What a subscriber keeps between the two halves of an apply."""

from __future__ import annotations

import time
from dataclasses import dataclass

from deltachain.chain.fetch import Fetched
from deltachain.subscribe.receipt import ApplyReceipt
from deltachain.subscribe.targets.base import HeldVersion, Prepared
from deltachain.types import StateDigest


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A proven apply that waits for its swap.

    Attributes:
        held: What the target is proven to hold as it is staged; ``None`` for nothing.
        to: What it will hold.
        step: The trainer's step of that version.
        time: When that version was committed, by the publisher's clock.
        generation: Swaps of the subscriber so far; another swap voids this.
        fetched: The objects.
        prepared: What the target will write.
        head: The newest version when staging ended.
        fetch_s: Seconds of planning and fetching.
        stage_s: Seconds of decoding and proving.
    """

    held: HeldVersion | None
    to: HeldVersion
    step: int | None
    time: float
    generation: int
    fetched: Fetched
    prepared: Prepared
    head: int
    fetch_s: float
    stage_s: float

    def receipt(self, *, swap_s: float, pause_s: float, requests: int) -> ApplyReceipt:
        """What is said of it once it is swapped."""
        return ApplyReceipt(
            version=self.to.version,
            previous=self.held.version if self.held else None,
            step=self.step,
            state=StateDigest.parse(self.to.state),
            plan=str(self.fetched.plan),
            nnz=self.prepared.nnz,
            nbytes=self.fetched.nbytes,
            requests=requests,
            refetched=self.fetched.refetched,
            lag_versions=self.head - self.to.version,
            staleness_s=max(0.0, time.time() - self.time),
            fetch_s=self.fetch_s,
            stage_s=self.stage_s,
            swap_s=swap_s,
            pause_s=pause_s,
        )
