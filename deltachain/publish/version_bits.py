"""Bits of one version, readable while later diffs advance the snapshot."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Final

import numpy as np

from deltachain.chain.chain import Committed
from deltachain.chain.plan import Replay
from deltachain.errors import ChainError
from deltachain.kernels import host
from deltachain.publish.model.source import Weight
from deltachain.publish.snapshot import Snapshot
from deltachain.publish.wire_form import Diff
from deltachain.types import Bits, Indices, StateDigest, Version

CHUNK: Final = 1 << 23
"""Elements copied at a time, the longest that a diff waits for: a few milliseconds."""

PAUSE_S: Final = 1e-4
"""Pause between two chunks, in seconds, so that a waiting diff gets the lock."""


class VersionBits:
    """Bits of a snapshot as they are when this is made, each weight taken once. Thread-safe.

    Later diffs are kept as old bits until the weight that they change is taken, and undone in the
    copy that is returned, not in the snapshot. One thread advances the snapshot, with the lock
    held; another takes the weights.

    Args:
        snapshot: The snapshot, at the version.
        weights: All weights to take.
        changing: Lock of the snapshot, held while it changes.

    Attributes:
        state: Contribution of these bits to the state digest.
        kept_nbytes: Size of the old bits and indices that are kept, in bytes.
        most_nbytes: The largest value of ``kept_nbytes`` so far.
    """

    def __init__(self, snapshot: Snapshot, weights: Iterable[Weight], changing: Lock) -> None:
        self._snapshot, self._changing = snapshot, changing
        self._kept: dict[str, list[tuple[Indices, Bits]]] = {
            weight.spec.name: [] for weight in weights
        }
        self._abandoned = ""
        self.state: StateDigest = snapshot.state
        self.kept_nbytes = self.most_nbytes = 0

    def keep(self, diff: Diff) -> None:
        """Keep the old bits of a diff that advanced the snapshot; call with the lock held."""
        for name, changes in diff.live.items():
            if name in self._kept:
                self._kept[name].append((changes.indices, changes.old))
                self.kept_nbytes += changes.indices.nbytes + changes.old.nbytes
        self.most_nbytes = max(self.most_nbytes, self.kept_nbytes)

    def abandon(self, reason: str) -> None:
        """Keep nothing more, and refuse to take further weights.

        Args:
            reason: Message of the error that ``take`` raises.
        """
        with self._changing:
            self._abandoned, self._kept = reason, {}
            self.kept_nbytes = 0

    def take(self, weight: Weight) -> Bits:
        """Return a copy of a weight's flat bits at the version; forget what was kept of it.

        Raises:
            ChainError: The bits were abandoned.
        """
        with self._changing:
            live = self._snapshot.bits(weight)
        bits = np.empty_like(live)
        for at in range(0, live.size, CHUNK):
            with self._changing:  # a failed diff reverts itself under the lock
                bits[at : at + CHUNK] = live[at : at + CHUNK]
            time.sleep(PAUSE_S)
        with self._changing:
            if self._abandoned:
                raise ChainError(self._abandoned)
            # The oldest comes last: whenever an element was copied, it ends as it was then.
            for indices, old in reversed(self._kept.pop(weight.spec.name)):
                host.scatter_(bits, indices, old)
                self.kept_nbytes -= indices.nbytes + old.nbytes
        return bits


@dataclass(frozen=True, slots=True, kw_only=True)
class LateAnchor:
    """An anchor on its way while later versions are committed, on every rank.

    Attributes:
        version: The version that it leads to.
        committed: Manifest of the version; on rank 0.
        before: What a newcomer would fetch of all versions of the writer up to this one.
        bits: Bits of the version on this rank.
    """

    version: Version
    committed: Committed | None
    before: Replay
    bits: VersionBits
