"""The last applies, kept so that they can be taken back without the store."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from deltachain.subscribe.targets.base import HeldVersion, Prepared
from deltachain.types import Version


@dataclass(frozen=True, slots=True)
class Undo:
    """How to take back one apply: what was held before, and what leads there."""

    held: HeldVersion
    prepared: Prepared


class UndoLog:
    """Old bits of the newest applies, bounded in number and in bytes.

    Args:
        applies: Most applies that are kept.
        nbytes: Most bytes that they take.
    """

    def __init__(self, applies: int, nbytes: int) -> None:
        self._log: deque[Undo] = deque(maxlen=applies)
        self._nbytes = nbytes

    def push(self, held: HeldVersion, prepared: Prepared) -> None:
        """Keep an apply that replaced ``held``; the oldest make room for it."""
        self._log.append(Undo(held, prepared.undo()))
        while self._log and sum(undo.prepared.nbytes for undo in self._log) > self._nbytes:
            self._log.popleft()

    def clear(self) -> None:
        """Forget everything: what is kept no longer applies to what is held."""
        self._log.clear()

    def last(self) -> Undo:
        """How to take back the newest apply."""
        return self._log[-1]

    def pop(self) -> None:
        """Forget the newest apply: it was taken back."""
        self._log.pop()

    def reaches(self, version: Version) -> bool:
        """Whether taking back applies leads to ``version``."""
        return any(undo.held.version == version for undo in self._log)

    @property
    def newest(self) -> Version | None:
        """The version that taking back the newest apply leads to."""
        return self._log[-1].held.version if self._log else None
