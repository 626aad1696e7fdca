"""A chain copied into another store, proven and resumable."""

from deltachain.mirror.mirror import Mirror, MirrorReceipt, follow, promote

__all__ = ["Mirror", "MirrorReceipt", "follow", "promote"]
