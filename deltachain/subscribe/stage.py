"""State of an apply between stage and swap."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from deltachain.chain.fetch import Fetched
from deltachain.errors import BaseMismatchError
from deltachain.subscribe.receipt import ApplyReceipt
from deltachain.subscribe.targets.base import HeldVersion, Prepared
from deltachain.types import StateDigest, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A proven apply, ready to swap.

    Attributes:
        held: The version held when it was staged; ``None`` for nothing.
        to: The version held after the swap.
        step: The trainer's step of the new version.
        time: Time of its commit in seconds since 1970, on the publisher's clock.
        publish_phases: Seconds of the publisher's phases before the commit, by name.
        generation: Number of swaps of the subscriber; another swap invalidates this apply.
        fetched: The fetched objects.
        prepared: The prepared writes of the target.
        head: The newest version when staging ended.
        look_s: Seconds from the commit until staging began; differs from wall time by the offset of
            the publisher's clock.
        fetch_s: Seconds of planning and fetching, until the last object arrived.
        stage_s: Seconds of decoding and verification after that; before it, they overlap.
    """

    held: HeldVersion | None
    to: HeldVersion
    step: int | None
    time: float
    publish_phases: Mapping[str, float]
    generation: int
    fetched: Fetched
    prepared: Prepared
    head: int
    look_s: float
    fetch_s: float
    stage_s: float

    def receipt(self, *, swap_s: float, pause_s: float, requests: int) -> ApplyReceipt:
        """Build the receipt after the swap."""
        return ApplyReceipt(
            version=self.to.version,
            previous=self.held.version if self.held else None,
            step=self.step,
            state=StateDigest.parse(self.to.state),
            plan=str(self.fetched.plan),
            nnz=self.prepared.nnz,
            nbytes=self.fetched.nbytes,
            requests=requests,
            refetched=self.fetched.refetched,
            lag_versions=self.head - self.to.version,
            staleness_s=max(0.0, time.time() - self.time),
            publish_phases=self.publish_phases,
            look_s=self.look_s,
            fetch_s=self.fetch_s,
            stage_s=self.stage_s,
            swap_s=swap_s,
            pause_s=pause_s,
        )


def overtaken(version: Version) -> BaseMismatchError:
    """Return the error of a staged version that another swap has overtaken."""
    message = f"version {version} was staged before another swap"
    return BaseMismatchError(message, version=version, hint="stage again")
