"""Fetch of the cheapest plan whose objects are all usable."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.fetch import Fetched, fetching
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

_T = TypeVar("_T")


def fetch_around(
    chain: Chain,
    held: HeldVersion | None,
    committed: Committed,
    use: Callable[[Fetched], _T],
    *,
    base: Path | None,
    hold: bool = True,
) -> tuple[Fetched, _T]:
    """Use the cheapest plan while it is fetched; again without an edge that has an unusable object.

    Args:
        chain: The chain.
        held: The version held; ``None`` for nothing.
        committed: The version to reach.
        use: Called with a plan whose objects may still be on their way; called again with another
            plan if one of them turns out to be unusable.
        base: Local folder of the base checkpoint.
        hold: Whether large objects are held in memory in any case; see :func:`fetching`.

    Returns:
        The plan, whose objects have all arrived, and the result of ``use``.

    Raises:
        DeltaChainError: An object is unusable, and no plan avoids it.
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
            with fetching(chain, plan, target=committed, base=base, hold=hold) as fetched:
                return fetched, use(fetched)
        except (FormatError, ObjectNotFoundError, ConfigError) as exc:
            bad = _unusable(plan, exc)
            if not bad:
                raise
            logger.warning("planning around %s->%d: %s", bad[0].kind, bad[0].version, exc)
            avoid += bad
            failure = exc


def _named(failure: DeltaChainError, committed: Committed) -> DeltaChainError:
    """Replace the error for a missing manifest by one that names the gap."""
    key = failure.key if isinstance(failure, ObjectNotFoundError) else ""
    version = version_of(key)
    if version is None or key != manifest_key(version):
        return failure
    return BrokenChainError(
        f"manifest of version {version} is missing ({key}), and no plan to version "
        f"{committed.version} avoids it",
        version=version,
        hint="manifests must never be deleted: restore it, or publish an anchor",
    )


def _unusable(plan: Plan, exc: DeltaChainError) -> list[EdgeSummary]:
    """Return the edges of a plan that an error concerns."""
    if isinstance(exc, ConfigError):
        return [edge for edge in plan.edges if edge.kind == "base"]
    key = exc.key if isinstance(exc, FormatError | ObjectNotFoundError) else ""
    found = [edge for edge in plan.edges if edge.version == version_of(key)]
    return found or [edge for edge in plan.edges if edge.kind == "base"]
