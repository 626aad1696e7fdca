"""Ways of readers to kept versions, found as readers find them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from contextlib import suppress

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.plan import Plan
from deltachain.chain.reachable import plan_present
from deltachain.errors import BrokenChainError
from deltachain.format.documents import EdgeSummary
from deltachain.types import Version

logger = logging.getLogger(__name__)


def ways_to(
    chain: Chain,
    versions: Iterable[Version],
    head: Committed,
    edges: Collection[EdgeSummary],
    ended: Collection[EdgeSummary] = (),
) -> set[EdgeSummary]:
    """Return the edges of the plans that lead readers from nothing to versions.

    A reader knows only the anchors that the manifest of a version and the next one list. These
    anchors stay as well, so that it finds its way also when others are gone.

    Args:
        chain: The chain.
        versions: Versions to keep; one that no plan leads to is left out, with a warning.
        head: The newest version.
        edges: All edges of the chain.
        ended: Pruned edges whose grace is over, which are used only where nothing else leads on.

    Raises:
        BrokenChainError: No plan whose objects are there leads to the head.
    """
    stay = set(_plan(chain, head, edges, ended).edges) | set(_listed(chain, head, edges))
    lost = []
    for version in versions:
        committed = chain.find(version)
        plan = None
        if committed is not None:
            with suppress(BrokenChainError):
                plan = _plan(chain, committed, edges, ended)
        if committed is None or plan is None:
            lost.append(version)
            continue
        stay.update(plan.edges)
        stay.update(_listed(chain, committed, edges))
    if lost:
        logger.warning(
            "kept versions that cannot be reached any more: %d, version %d first",
            len(lost),
            lost[0],
        )
    return stay


def ways_between(chain: Chain, first: Version, edges: Collection[EdgeSummary]) -> set[EdgeSummary]:
    """Return the anchors before a version that later manifests may list, and the ways from them.

    Args:
        chain: The chain.
        first: The first of the newest versions.
        edges: All edges of the chain.
    """
    committed = chain.find(first)
    listed = [] if committed is None else _listed(chain, committed, edges)
    oldest = min((edge.version for edge in listed), default=first)
    anchors = [edge for edge in edges if edge.base is None and oldest <= edge.version <= first]
    stay = set(anchors)
    for start in {edge.version for edge in anchors}:
        if committed is not None and start < first:
            try:
                plan = plan_present(chain, start, committed)
            except BrokenChainError:
                continue
            stay.update(plan.edges)
    return stay


def _plan(
    chain: Chain,
    target: Committed,
    edges: Collection[EdgeSummary],
    ended: Collection[EdgeSummary],
) -> Plan:
    """Return a reader's plan from nothing, if need be over pruned edges that are still there.

    Where that leads on, the plan starts at an anchor that manifests list for good: the head hint
    names others tomorrow.

    Raises:
        BrokenChainError: There is none.
    """
    listed = _listed(chain, target, edges)
    hinted = [edge for edge in edges if edge.base is None and edge not in listed]
    avoided = [*hinted, *ended]
    for avoid, pruned in ((avoided, False), (avoided, True), (ended, False), (ended, True)):
        with suppress(BrokenChainError):
            return plan_present(chain, None, target, avoid=avoid, pruned=pruned)
    return plan_present(chain, None, target, pruned=True)


def _listed(
    chain: Chain, committed: Committed, edges: Collection[EdgeSummary]
) -> list[EdgeSummary]:
    """Return the anchors that a manifest and the next one list."""
    later = chain.find(committed.version + 1)
    found = {*committed.manifest.recent, *(later.manifest.recent if later else ())}
    places = {(edge.version, edge.record) for edge in found if edge.base is None}
    return [
        edge
        for edge in edges
        if edge.base is None
        and edge.version <= committed.version
        and (edge.version, edge.record) in places
    ]
