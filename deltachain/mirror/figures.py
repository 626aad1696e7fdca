"""Figures of a mirror, for metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator

from deltachain.errors import DeltaChainError
from deltachain.figures import Figure, figures, info
from deltachain.mirror.mirror import Mirror
from deltachain.mirror.receipt import MirrorReceipt


class MirrorTotals:
    """Sums over all rounds of this process."""

    def __init__(self) -> None:
        self._versions = self._objects = self._nbytes = self._failures = 0
        self._head: int | None = None
        self._looked_at: float | None = None
        self._applied_at: float | None = None
        self._since = time.monotonic()

    def count(self, receipt: MirrorReceipt) -> None:
        """Add a copied version."""
        self._versions += 1
        self._objects += receipt.objects
        self._nbytes += receipt.nbytes
        self._head, self._applied_at = receipt.head, time.time()

    def looked(self, trouble: DeltaChainError | None) -> None:
        """Record the end of a round."""
        if trouble is not None:
            self._failures += 1
            return
        self._looked_at, self._since = time.time(), time.monotonic()

    def figures(self, mirror: Mirror) -> Iterator[Figure]:
        """Yield the figures of the mirror that was copied, from memory."""
        version = mirror.version if mirror.version >= 0 else None
        head = self._head if version is None else max(version, self._head or 0)
        yield info(engine="mirror", chain=mirror.chain)
        yield from figures(
            {
                "version": version,
                "head_version": head,
                "lag_versions": None if head is None or version is None else head - version,
                "left_out_payloads": len(mirror.left_out),
                "last_look_timestamp_seconds": self._looked_at,
                "last_apply_timestamp_seconds": self._applied_at,
                "silence_seconds": time.monotonic() - self._since,
                "applies": self._versions,
                "failures": self._failures,
                "copied_objects": self._objects,
                "copied_bytes": self._nbytes,
            }
        )
