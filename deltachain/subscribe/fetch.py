"""The way to a version: the cheapest one whose objects can all be used."""

from __future__ import annotations

import logging
from pathlib import Path

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.fetch import Fetched, fetch
from deltachain.chain.plan import Plan
from deltachain.errors import (
    BrokenChainError,
    ConfigError,
    DeltaChainError,
    FormatError,
    ObjectNotFoundError,
)
from deltachain.format.documents import EdgeSummary
from deltachain.format.keys import manifest_key, version_of
from deltachain.subscribe.targets.base import HeldVersion

logger = logging.getLogger(__name__)


def fetch_around(
    chain: Chain, held: HeldVersion | None, committed: Committed, *, base: Path | None
) -> Fetched:
    """Fetch the cheapest plan that works: one with an unusable object is planned around.

    Args:
        chain: The chain.
        held: Where from; ``None`` for nothing.
        committed: Where to.
        base: The checkpoint that a base reference stands for.

    Raises:
        DeltaChainError: What is wrong with an object that no way leads around.
    """
    avoid: list[EdgeSummary] = []
    failure: DeltaChainError | None = None
    while True:
        try:
            plan = chain.plan(held.version if held else None, committed, avoid=avoid)
        except BrokenChainError:
            if failure is not None:
                raise _named(failure, committed) from failure.__cause__
            raise
        try:
            return fetch(chain, plan, target=committed, base=base)
        except (FormatError, ObjectNotFoundError, ConfigError) as exc:
            bad = _unusable(plan, exc)
            if not bad:
                raise
            logger.warning("planning around %s->%d: %s", bad[0].kind, bad[0].version, exc)
            avoid += bad
            failure = exc


def _named(failure: DeltaChainError, committed: Committed) -> DeltaChainError:
    """What no way leads around: a gap in the chain is told from an object that is gone."""
    key = failure.key if isinstance(failure, ObjectNotFoundError) else ""
    version = version_of(key)
    if version is None or key != manifest_key(version):
        return failure
    return BrokenChainError(
        f"manifest of version {version} is missing ({key}), and no way leads around it to version "
        f"{committed.version}",
        version=version,
        hint="manifests are never deleted: put it back, or publish an anchor",
    )


def _unusable(plan: Plan, exc: DeltaChainError) -> list[EdgeSummary]:
    """The edge of a plan that an error is about."""
    if isinstance(exc, ConfigError):
        return [edge for edge in plan.edges if edge.kind == "base"]
    key = exc.key if isinstance(exc, FormatError | ObjectNotFoundError) else ""
    found = [edge for edge in plan.edges if edge.version == version_of(key)]
    return found or [edge for edge in plan.edges if edge.kind == "base"]
