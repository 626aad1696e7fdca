"""Mirrors: a chain copied into another store, version by version, proven and resumable."""

from deltachain.mirror.follow import follow
from deltachain.mirror.mirror import Mirror, MirrorReceipt, promote

__all__ = ["Mirror", "MirrorReceipt", "follow", "promote"]
