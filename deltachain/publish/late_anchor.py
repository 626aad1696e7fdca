"""An anchor on its way while later versions are committed."""

from __future__ import annotations

from dataclasses import dataclass

from deltachain.chain.anchor_cost import Replay
from deltachain.chain.chain import Committed
from deltachain.publish.version_bits import VersionBits
from deltachain.types import Version


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
