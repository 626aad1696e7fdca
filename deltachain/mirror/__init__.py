"""Mirrors: a chain copied into another store, version by version, proven and resumable."""

from deltachain.mirror.mirror import Mirror, MirrorReceipt, follow, promote

__all__ = ["Mirror", "MirrorReceipt", "follow", "promote"]
