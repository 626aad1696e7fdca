"""A link that many transfers share in equal parts, each up to a limit of its own."""

from __future__ import annotations

import heapq
from itertools import count

from simpy import Environment, Event


class Link:
    """What one store sends: every transfer under way has an equal share.

    Args:
        env: Environment of the simulation.
        rate: Bytes a second of all transfers together.
        most: Bytes a second of one transfer at most.

    Attributes:
        nbytes: Bytes of all transfers so far.
    """

    def __init__(self, env: Environment, *, rate: float, most: float) -> None:
        self.nbytes = 0
        self._env, self._rate, self._most = env, rate, most
        self._sent = 0.0  # bytes that a transfer would have received which began at the start
        self._at = 0.0
        self._ends: list[tuple[float, int, Event]] = []
        self._number = count()
        self._round = 0

    def transfer(self, nbytes: int) -> Event:
        """Begin a transfer; return the event of its end."""
        self._move()
        done = self._env.event()
        self.nbytes += nbytes
        heapq.heappush(self._ends, (self._sent + nbytes, next(self._number), done))
        self._plan()
        return done

    @property
    def _share(self) -> float:
        """Bytes a second of each transfer now."""
        return min(self._most, self._rate / max(1, len(self._ends)))

    def _move(self) -> None:
        """Take the time since the last change into account."""
        self._sent += (self._env.now - self._at) * self._share
        self._at = self._env.now

    def _plan(self) -> None:
        """Schedule the next end; earlier schedules do not count any more."""
        self._round += 1
        if self._ends:
            left = max(0.0, self._ends[0][0] - self._sent)
            due = self._env.timeout(left / self._share, self._round)
            due.callbacks.append(self._end)

    def _end(self, due: Event) -> None:
        if due.value != self._round:
            return
        self._move()
        self._sent = max(self._sent, self._ends[0][0])  # rounding must not repeat it
        while self._ends and self._ends[0][0] <= self._sent:
            heapq.heappop(self._ends)[2].succeed()
        self._plan()
