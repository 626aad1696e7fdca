"""Exchange of staged and live bits, block by block, which can stop anywhere and go back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from deltachain.kernels import host
from deltachain.kernels.protocol import LiveBits, kernels_for

HOST_BLOCK: Final = 1 << 17
"""Elements of a block on the host: twice as many took four times as long."""

DEVICE_BLOCK: Final = 1 << 23
"""Elements of a block on a device: enough for its memory bandwidth, at most 128 MiB of copies."""


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Copies of both versions of the block being exchanged; either place may hold parts of both.

    Attributes:
        start: First element.
        stop: Element after the last.
        before: Live bits without the exchange.
        after: Live bits after it.
    """

    start: int
    stop: int
    before: Any
    after: Any


class Exchange:
    """Staged bits of a whole tensor that change places with the live bits.

    Nothing is copied ahead: afterwards the staged array holds the live bits from before, and a
    second exchange restores them. An exception at any point, also between two copies of a block,
    loses no bit: :meth:`run` continues or reverts from there. Compiled code on the host exchanges a
    tensor in one call, in which no exception is raised.

    Args:
        staged: ``(n,)`` bits in memory of their own, which this exchange writes into.
    """

    def __init__(self, staged: LiveBits) -> None:
        self._staged: Any = staged
        self._done = np.zeros(1, np.int64)  # elements exchanged, unless a block is open
        self._block: _Block | None = None
        if self._is_compiled():  # before the pause, if it was not yet
            none: Any = staged[:0]
            host.exchange_(none, none, self._done, 0)

    def _is_compiled(self) -> bool:
        return isinstance(self._staged, np.ndarray) and str(host.NAME) == "numba"

    @property
    def staged(self) -> LiveBits:
        """The staged array: new bits before the exchange, old bits after it."""
        found: LiveBits = self._staged
        return found

    def run(self, live: LiveBits, *, back: bool = False) -> None:
        """Exchange all elements, or take back those that were exchanged; a repetition is allowed.

        Args:
            live: ``(n,)`` live bits, the same in each call.
            back: Whether to return to the state before the exchange.
        """
        bits: Any = live
        end = 0 if back else len(self._staged)
        if self._is_compiled():
            host.exchange_(bits, self._staged, self._done, end)
            return
        while self._block is not None or self._done[0] != end:
            if self._block is None:
                self._block = self._next(bits, int(self._done[0]), end)
            self._finish(bits, self._block, back=back)
            self._block = None

    def _next(self, live: Any, at: int, end: int) -> _Block:  # noqa: ANN401
        """Copy both versions of the next block on the way to ``end``."""
        copy = kernels_for(live).copy
        size = HOST_BLOCK if isinstance(live, np.ndarray) else DEVICE_BLOCK
        start, stop = (at, min(at + size, end)) if at < end else (max(at - size, end), at)
        mine, other = copy(live[start:stop]), copy(self._staged[start:stop])
        return _Block(start, stop, *((mine, other) if at < end else (other, mine)))

    def _finish(self, live: Any, block: _Block, *, back: bool) -> None:  # noqa: ANN401
        """Write the open block into both places; may be repeated, also in the other direction."""
        overwrite_ = kernels_for(live).overwrite_
        mine, other = (block.before, block.after) if back else (block.after, block.before)
        overwrite_(live[block.start : block.stop], mine)
        overwrite_(self._staged[block.start : block.stop], other)
        self._done[0] = block.start if back else block.stop
