"""What a subscriber keeps between the two halves of an apply."""

from __future__ import annotations

from dataclasses import dataclass

from deltachain.fetch import Fetched
from deltachain.subscribe.target import Held, Prepared


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

    held: Held | None
    to: Held
    step: int | None
    time: float
    generation: int
    fetched: Fetched
    prepared: Prepared
    head: int
    fetch_s: float
    stage_s: float
