"""Undo log of the newest applies, for rollbacks without the store."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from deltachain.subscribe.targets.base import HeldVersion, Prepared
from deltachain.types import Version


@dataclass(frozen=True, slots=True)
class Undo:
    """Undo of one apply: the version held before, and the writes that restore it."""

    held: HeldVersion
    prepared: Prepared


class UndoLog:
    """Old bits of the newest applies, bounded in number and in bytes.

    Args:
        applies: Largest number of applies.
        nbytes: Largest size, in bytes.
    """

    def __init__(self, applies: int, nbytes: int) -> None:
        self._log: deque[Undo] = deque(maxlen=applies)
        self._nbytes = nbytes

    def push(self, held: HeldVersion, prepared: Prepared) -> None:
        """Add the apply that replaced ``held``; drop the oldest above the bounds."""
        self._log.append(Undo(held, prepared.undo()))
        while self._log and sum(undo.prepared.nbytes for undo in self._log) > self._nbytes:
            self._log.popleft()

    def clear(self) -> None:
        """Drop all applies, which no longer fit the target."""
        self._log.clear()

    def last(self) -> Undo:
        """Undo of the newest apply."""
        return self._log[-1]

    def pop(self) -> None:
        """Drop the newest apply after its undo."""
        self._log.pop()

    def reaches(self, version: Version) -> bool:
        """Return whether undoing applies leads to ``version``."""
        return any(undo.held.version == version for undo in self._log)

    @property
    def newest(self) -> Version | None:
        """Version restored by undoing the newest apply; ``None`` if the log is empty."""
        return self._log[-1].held.version if self._log else None
