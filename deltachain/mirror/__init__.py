"""Mirrors: a chain copied into another store, in the order of dependence, proven and resumable."""

from deltachain.mirror.follow import follow
from deltachain.mirror.mirror import Mirror
from deltachain.mirror.promote import promote
from deltachain.mirror.receipt import MirrorReceipt

__all__ = ["Mirror", "MirrorReceipt", "follow", "promote"]
