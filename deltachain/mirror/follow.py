"""The loop of a mirror that follows its source, and what it shows of itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from threading import Event

from deltachain.errors import DeltaChainError
from deltachain.figures import Figure, figures, info
from deltachain.mirror.mirror import LOOK_BACK, Mirror, MirrorReceipt
from deltachain.subscribe.rounds import Round, repeat
from deltachain.types import Version


def follow(
    mirror: Mirror,
    *,
    stop: Event,
    poll_s: float,
    looked: Callable[[DeltaChainError | None], None] = lambda _: None,
) -> Iterator[MirrorReceipt]:
    """Copy versions as they are committed, until ``stop`` is set.

    A store that is unavailable, and an object that is missing or damaged, are logged once and tried
    again with back-off.

    Args:
        mirror: The mirror.
        stop: Ends the loop.
        poll_s: Seconds between two looks at the source.
        looked: Called after each round with the error to be retried, or ``None``.

    Raises:
        ForkedChainError: Source and mirror have different histories.
        ConfigError: The destination is no mirror, or not any more.
        ChainMismatchError: The destination mirrors another chain.
        UnsupportedFormatError: The chain needs a newer deltachain.
    """

    def round_(failures: int) -> Round[MirrorReceipt]:
        if failures:
            mirror.rounds += LOOK_BACK - 1 - mirror.rounds % LOOK_BACK  # this one looks back
        yield from mirror.catch_up(stop)
        looked(None)
        return False

    return repeat(round_, stop=stop, poll_s=poll_s, looked=looked, doing="mirroring")


class MirrorTotals:
    """Sums over all rounds of this process.

    Attributes:
        looked_at: Time at which the source last answered, in seconds since 1970; ``None`` before.
        trouble: Error of the last round; ``None`` for none.
    """

    def __init__(self) -> None:
        self._versions = self._objects = self._nbytes = self._failures = 0
        self.looked_at: float | None = None
        self.applied_at: float | None = None
        self.trouble: DeltaChainError | None = None
        self._since = time.monotonic()

    def silence_of(self, mirror: Mirror) -> float:
        """Return the seconds since the source last answered a round, or since the start.

        0 while objects are copied; of stores that tell, only while their requests are answered.
        """
        since: float | None = self._since
        if mirror.is_copying:
            both = (mirror.source.unanswered_since, mirror.destination.unanswered_since)
            since = min((one for one in both if one is not None), default=None)
        return 0.0 if since is None else time.monotonic() - since

    def count(self, receipt: MirrorReceipt) -> None:
        self._versions += 1
        self._objects += receipt.objects
        self._nbytes += receipt.nbytes
        self.applied_at = time.time()
        self.looked_at, self._since = self.applied_at, time.monotonic()

    def looked(self, trouble: DeltaChainError | None) -> None:
        self.trouble = trouble
        if trouble is not None:
            self._failures += 1
            return
        self.looked_at, self._since = time.time(), time.monotonic()

    def version_of(self, mirror: Mirror) -> Version | None:
        return mirror.version if mirror.version >= 0 else None

    def head_of(self, mirror: Mirror) -> Version | None:
        return mirror.head if mirror.head >= 0 else self.version_of(mirror)

    def figures(self, mirror: Mirror) -> Iterator[Figure]:
        version, head = self.version_of(mirror), self.head_of(mirror)
        yield info(engine="mirror", chain=mirror.chain)
        yield from figures(
            {
                "version": version,
                "head_version": head,
                "lag_versions": None if head is None or version is None else head - version,
                "left_out_payloads": len(mirror.left_out),
                "last_look_timestamp_seconds": self.looked_at,
                "last_apply_timestamp_seconds": self.applied_at,
                "silence_seconds": self.silence_of(mirror),
                "applies": self._versions,
                "failures": self._failures,
                "copied_objects": self._objects,
                "copied_bytes": self._nbytes,
            }
        )
