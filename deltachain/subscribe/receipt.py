"""Receipt of an apply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deltachain.types import StateDigest, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyReceipt:
    """Result of one swap, proven against the manifest's state digest before the first write.

    Attributes:
        version: The version now held.
        previous: The version held before; ``None`` for nothing.
        step: The trainer's step of the version.
        state: State digest of the version.
        plan: The plan, printed.
        nnz: Number of written elements.
        nbytes: Fetched bytes.
        requests: Requests to the store since the previous receipt, polls included.
        refetched: Keys of objects that were corrupt on the first read.
        lag_versions: Versions committed after this one, as of the end of staging.
        staleness_s: Seconds from the version's commit to the swap; differs from wall time by the
            offset of the publisher's clock.
        publish_phases: Seconds of the publisher's phases before the commit, by name, as it says in
            the manifest: ``diff``, ``encode``, and ``upload`` as a part of that.
        look_s: Seconds from the version's commit until this party began to fetch it, with the same
            offset.
        fetch_s: Seconds of planning and fetching.
        stage_s: Seconds of decoding and verification, while the target was in use.
        swap_s: Seconds of writing.
        pause_s: Seconds in which the target was unavailable: the swap, and for an engine the pause
            around it.

    Examples:
        >>> receipt = deltachain.Subscriber(url, weights).update()
        >>> receipt.previous, receipt.version, receipt.nnz
        (None, 1, 6)
    """

    version: Version
    previous: Version | None
    step: int | None
    state: StateDigest
    plan: str
    nnz: int
    nbytes: int
    requests: int
    refetched: tuple[str, ...]
    lag_versions: int
    staleness_s: float
    fetch_s: float
    stage_s: float
    swap_s: float
    pause_s: float
    look_s: float = 0.0
    publish_phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase of the version, from the diff to the swap, by name.

        ``upload`` is a part of ``encode``, and ``swap`` of ``pause``.
        """
        return {
            **self.publish_phases,
            "look": self.look_s,
            "fetch": self.fetch_s,
            "stage": self.stage_s,
            "pause": self.pause_s,
            "swap": self.swap_s,
        }

    def __str__(self) -> str:
        origin = "nothing" if self.previous is None else self.previous
        return (
            f"version {self.version} (from {origin}) nnz {self.nnz:,} {self.nbytes:,} B "
            f"fetch {self.fetch_s:.3f} s stage {self.stage_s:.3f} s swap {self.swap_s * 1e3:.1f} ms"
        )
