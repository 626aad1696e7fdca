"""Phase times of versions: what publisher and replicas spent on each, from the diff to the swap."""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import Final

from deltachain.format.documents import valid_times

REPLICA_PHASES: Final = ("look", "fetch", "stage", "pause", "swap")
"""Phases after the commit, in their order; ``swap`` is a part of ``pause``."""

KEPT: Final = 20_000
"""Applies that are kept: one of each version and replica."""

PhaseTimes = Mapping[str, float]
"""Seconds of phases, by name."""


def replica_phases(given: Mapping[str, object]) -> dict[str, float]:
    """Return the phases after the commit that a replica names; without invalid ones."""
    return valid_times(given, REPLICA_PHASES)


def middle(applies: Mapping[str, PhaseTimes]) -> dict[str, float]:
    """Return the median time of each phase.

    Args:
        applies: Phase times of one version, by replica.
    """
    found = {}
    for name in REPLICA_PHASES:
        times = [times[name] for times in applies.values() if name in times]
        if times:
            found[name] = statistics.median(times)
    return found


class PhaseTrack:
    """Phase times of each version in the replicas that applied it, by manifest; thread-safe.

    Beyond ``KEPT`` applies, those of the version that was first seen the longest ago are forgotten.
    A manifest means one version of one history, also after the store went back.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._count = 0
        self._applies: OrderedDict[str, dict[str, PhaseTimes]] = OrderedDict()
        self._middles: dict[str, PhaseTimes] = {}
        self._revision = 0
        self._changing = Lock()

    @property
    def revision(self) -> int:
        """Grows with every apply that is added."""
        return self._revision

    def add(self, engine: str, manifest: str, times: PhaseTimes) -> None:
        """Add the last apply of a replica; nothing changes if it was added before.

        Args:
            engine: Address of the replica.
            manifest: blake3 of the manifest of the version that it applied; empty if unknown.
            times: Its phase times.
        """
        with self._changing:
            if not manifest or not times or self._applies.get(manifest, {}).get(engine) == times:
                return
            applies = self._applies.setdefault(manifest, {})
            self._count += engine not in applies
            applies[engine] = times
            self._middles.pop(manifest, None)
            self._revision += 1
            while self._count > self._kept and len(self._applies) > 1:
                forgotten, lost = self._applies.popitem(last=False)
                self._count -= len(lost)
                self._middles.pop(forgotten, None)

    def of(self, manifest: str) -> dict[str, PhaseTimes]:
        """Return the phase times of one version, by replica."""
        with self._changing:
            return dict(self._applies.get(manifest, {}))

    def middles(self) -> dict[str, PhaseTimes]:
        """Return the median times of the phases of all versions that are kept, by manifest."""
        with self._changing:
            for manifest in self._applies.keys() - self._middles.keys():
                self._middles[manifest] = middle(self._applies[manifest])
            return dict(self._middles)
