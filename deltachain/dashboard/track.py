"""Track of a fleet: the versions that replicas held over time, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Final

from deltachain.dashboard.thinning import spread
from deltachain.types import Version

MOMENTS: Final = 2048
"""Moments that are kept: when there are more, every second one of all is forgotten."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Versions at one time.

    Attributes:
        time: The time, in seconds since 1970.
        newest: The newest version; ``None`` for none.
        held: Version held, by address of the replica; ``None`` if unknown.
    """

    time: float
    newest: Version | None
    held: Mapping[str, Version | None]


@dataclass(slots=True)
class FleetTrack:
    """Moments of a fleet, at equal distances; thread-safe.

    The whole time is covered: once the memory is full, the distances double.
    """

    _moments: list[Moment] = field(default_factory=list)
    _skipped: int = 0
    _stride: int = 1
    _changing: Lock = field(default_factory=Lock)

    def add(self, moment: Moment) -> None:
        """Add the newest moment."""
        with self._changing:
            self._skipped += 1
            if self._skipped < self._stride:
                return
            self._skipped = 0
            self._moments.append(moment)
            if len(self._moments) > MOMENTS:
                self._moments = self._moments[::2]
                self._stride *= 2

    def moments(self, most: int) -> list[Moment]:
        """Return at most ``most`` moments, oldest first, the newest one always."""
        with self._changing:
            return spread(self._moments, most)


def changes(moments: Iterable[Moment], engine: str) -> list[tuple[int, Version | None]]:
    """Return the version of a replica where it changed: the place among the moments, and it."""
    found: list[tuple[int, Version | None]] = []
    for place, moment in enumerate(moments):
        version = moment.held.get(engine)
        if not found or found[-1][1] != version:
            found.append((place, version))
    return found
