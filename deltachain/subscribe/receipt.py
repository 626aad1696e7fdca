"""Receipt of an apply."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from deltachain.chain.fetch import Fetched
from deltachain.errors import BaseMismatchError
from deltachain.format.documents import Manifest, phases_of
from deltachain.subscribe.targets.base import HeldVersion, Prepared
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
        step = "" if self.step is None else f"step {self.step} "
        return (
            f"version {self.version} (from {origin}) {step}nnz {self.nnz:,} {self.nbytes:,} B "
            f"fetch {self.fetch_s:.3f} s stage {self.stage_s:.3f} s swap {self.swap_s * 1e3:.1f} ms"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    held: HeldVersion | None  # the version held when it was staged; None for nothing
    to: HeldVersion  # the version held after the swap
    manifest: Manifest
    generation: int  # number of swaps of the subscriber; another swap invalidates this apply
    fetched: Fetched
    prepared: Prepared
    head: int  # the newest version when staging ended
    look_s: float  # seconds from the commit until staging began, by both clocks
    fetch_s: float  # seconds of planning and fetching, until the last object arrived
    stage_s: float  # seconds of decoding and verification after that; before it, they overlap

    def receipt(self, *, swap_s: float, pause_s: float, requests: int) -> ApplyReceipt:
        return ApplyReceipt(
            version=self.to.version,
            previous=self.held.version if self.held else None,
            step=self.manifest.step,
            state=StateDigest.parse(self.to.state),
            plan=str(self.fetched.plan),
            nnz=self.prepared.nnz,
            nbytes=self.fetched.nbytes,
            requests=requests,
            refetched=self.fetched.refetched,
            lag_versions=self.head - self.to.version,
            staleness_s=max(0.0, time.time() - self.manifest.time),
            publish_phases=phases_of(self.manifest),
            look_s=self.look_s,
            fetch_s=self.fetch_s,
            stage_s=self.stage_s,
            swap_s=swap_s,
            pause_s=pause_s,
        )


def overtaken(version: Version) -> BaseMismatchError:
    message = f"version {version} was staged before another swap"
    return BaseMismatchError(message, version=version, hint="stage again")


@dataclass(slots=True)
class Tally:
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
        if receipt is None or receipt is self._last:
            return
        self._last = receipt
        self.applies += 1
        for name in ("nbytes", "nnz", "fetch_s", "stage_s", "swap_s", "pause_s"):
            setattr(self, name, getattr(self, name) + getattr(receipt, name))
