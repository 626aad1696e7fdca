"""What an apply did."""

from __future__ import annotations

from dataclasses import dataclass

from deltachain.types import StateDigest, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyReceipt:
    """One swap, from the subscriber's side. The state was proven before anything was written.

    Attributes:
        version: The version now held.
        previous: The version held before; ``None`` for nothing.
        step: The trainer's step of the version.
        state: State digest of the version.
        plan: The plan, printed.
        nnz: Elements written.
        nbytes: Bytes fetched.
        requests: Requests to the store since the receipt before, looks for new versions included.
        refetched: Objects that were corrupt at first.
        lag_versions: Versions that were committed meanwhile, as seen when staging ended.
        staleness_s: Seconds from the version's commit to the swap, by two clocks.
        fetch_s: Seconds of planning and fetching.
        stage_s: Seconds of decoding, gathering and proving, while the target was in use.
        swap_s: Seconds of writing.
        pause_s: Seconds that the target was out of use: writing, and an engine's pause around it.
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

    def __str__(self) -> str:
        origin = "nothing" if self.previous is None else self.previous
        return (
            f"version {self.version} (from {origin}) nnz {self.nnz:,} {self.nbytes:,} B "
            f"fetch {self.fetch_s:.3f} s stage {self.stage_s:.3f} s swap {self.swap_s * 1e3:.1f} ms"
        )
