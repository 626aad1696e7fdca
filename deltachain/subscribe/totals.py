"""Totals of all applies of a subscriber, for metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from deltachain.subscribe.receipt import ApplyReceipt


@dataclass(slots=True)
class Tally:
    """Sums over all applies of this process.

    Attributes:
        applies: Number of applies.
        failures: Number of failed looks, updates and rollbacks.
        nbytes: Bytes fetched.
        nnz: Elements written.
        fetch_s: Seconds of fetching.
        stage_s: Seconds of decoding and proving.
        swap_s: Seconds of writing.
        pause_s: Seconds in which the engine generated nothing.
    """

    applies: int = 0
    failures: int = 0
    nbytes: int = 0
    nnz: int = 0
    fetch_s: float = 0.0
    stage_s: float = 0.0
    swap_s: float = 0.0
    pause_s: float = 0.0
    _last: ApplyReceipt | None = field(default=None, repr=False)

    def count(self, receipt: ApplyReceipt | None) -> None:
        """Add an apply, unless it is the one added last."""
        if receipt is None or receipt is self._last:
            return
        self._last = receipt
        self.applies += 1
        self.nbytes += receipt.nbytes
        self.nnz += receipt.nnz
        self.fetch_s += receipt.fetch_s
        self.stage_s += receipt.stage_s
        self.swap_s += receipt.swap_s
        self.pause_s += receipt.pause_s
