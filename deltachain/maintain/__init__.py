"""Skips, anchors and prunes, by any process that may write to the store."""

from deltachain.maintain.maintainer import Maintained, Maintainer, MaintainerThread
from deltachain.maintain.pruner import KeepRule, PrunePlan, Pruner

__all__ = ["KeepRule", "Maintained", "Maintainer", "MaintainerThread", "PrunePlan", "Pruner"]
