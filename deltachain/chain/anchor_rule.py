"""When a chain is due for another anchor, a pure function of a newcomer's replay."""

from dataclasses import dataclass
from typing import Final

from deltachain.types import Version

ANCHOR_FACTOR: Final = 3.0
"""Default of ``anchor_factor``: anchors and manifests cost at most half of the deltas."""

MOST_VERSIONS: Final = 8192
"""Versions after which an anchor is due whatever it costs, so that no newcomer's plan grows without
bound where little changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    versions: int = 0
    deltas: int = 0
    manifests: int = 0

    def __add__(self, other: "Replay") -> "Replay":
        return Replay(
            versions=self.versions + other.versions,
            deltas=self.deltas + other.deltas,
            manifests=self.manifests + other.manifests,
        )

    def __sub__(self, other: "Replay") -> "Replay":
        return Replay(
            versions=self.versions - other.versions,
            deltas=self.deltas - other.deltas,
            manifests=self.manifests - other.manifests,
        )


def anchor_due(
    replay: Replay | None,
    anchor_nbytes: int,
    *,
    factor: float = ANCHOR_FACTOR,
    every: Version | None = None,
) -> bool:
    """Return whether a chain is due for another anchor.

    One is due when the deltas since the last one are ``factor - 1`` times the size of an anchor and
    of the manifests since. Between two anchors, anchor and manifests then cost at most
    ``1 / (factor - 1)`` of the deltas, and a newcomer fetches about ``factor`` anchors at most.
    The number of requests plays no part: anchors that save requests would cost a small model many
    times its deltas, and skips save more of them. ``every`` replaces
    ``factor`` by a number of versions; ``replay`` is ``None`` if no edges lead from nothing.
    """
    if replay is None:
        return True
    if replay.versions <= 0:
        return False
    if every is not None:
        return replay.versions >= every
    if factor <= 1 or replay.versions >= MOST_VERSIONS:
        return True
    return replay.deltas >= (factor - 1) * (anchor_nbytes + replay.manifests)
