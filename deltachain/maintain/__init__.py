"""Maintenance of a chain: skips, anchors and prunes, by any process that may write to its store."""

from deltachain.maintain.keep import KeepRule
from deltachain.maintain.maintainer import Maintained, Maintainer, MaintainerThread
from deltachain.maintain.pruner import PrunePlan, Pruner

__all__ = ["KeepRule", "Maintained", "Maintainer", "MaintainerThread", "PrunePlan", "Pruner"]
