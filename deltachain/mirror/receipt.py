"""Receipt of a version in a mirror."""

from __future__ import annotations

from dataclasses import dataclass

from deltachain.types import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorReceipt:
    """What one version took to be copied.

    Attributes:
        version: The newest version of the mirror.
        head: The newest version of the source, when this round began.
        objects: Number of objects copied since the last receipt.
        nbytes: Their size, in bytes.
        left_out: Number of payloads named so far that the source does not have any more.
        seconds: Time since the last receipt.
    """

    version: Version
    head: Version
    objects: int
    nbytes: int
    left_out: int
    seconds: float

    @property
    def lag_versions(self) -> int:
        """Versions that the source has and the mirror does not."""
        return self.head - self.version
