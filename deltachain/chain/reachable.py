"""Whether a version can be rebuilt: plans of which every object exists."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Final

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.identity import refuse_mirror
from deltachain.chain.plan import Plan
from deltachain.errors import BrokenChainError, ConfigError, FormatError, ObjectNotFoundError
from deltachain.format.documents import Edge, EdgeSummary
from deltachain.threads import Pool
from deltachain.types import Version


def check_write_access(chain: Chain) -> None:
    """Raise if readers would not accept what this process adds to a chain.

    Raises:
        ConfigError: The store is the mirror of an unsigned chain, or the chain is signed and there
            is no signing key.
    """
    refuse_mirror(chain.store, chain.trust)
    if chain.trust.key is None and (head := chain.head()) is not None:
        check_signing_key(chain, head)


def check_signing_key(chain: Chain, head: Committed) -> None:
    """Raise if a writer without a signing key would add to a signed chain.

    Args:
        chain: The chain, opened by the writer.
        head: The newest version.

    Raises:
        ConfigError: The chain is signed, and the writer has no signing key.
    """
    if head.signatures and chain.trust.key is None:
        raise ConfigError(
            f"{chain.store.url} is a signed chain, and this process has no signing key: readers "
            "with trusted keys would refuse what it writes",
            hint="set DELTACHAIN_SIGNING_KEY; with a new key, set DELTACHAIN_TRUSTED_KEYS to the "
            "public key of the old one as well",
        )


READS: Final = 16
"""Documents read at a time."""


def plan_present(  # noqa: PLR0913 - each leaves out something else
    chain: Chain,
    held: Version | None,
    target: Committed,
    *,
    without: Collection[str] = (),
    avoid: Collection[EdgeSummary] = (),
    gone: Collection[str] = (),
    pruned: bool = False,
) -> Plan:
    """Find the cheapest plan whose documents and parts exist, by their sizes; reads no part.

    A base checkpoint lies outside the store and counts as present.

    Args:
        chain: The chain.
        held: The version held; ``None`` for nothing.
        target: The version to reach.
        without: Encodings that cannot be used, though they are known.
        avoid: Edges known to be unusable.
        gone: Keys of parts that count as missing.
        pruned: Whether to use pruned edges, whose objects may be deleted at any time.

    Raises:
        BrokenChainError: No plan exists of which every object exists.
    """
    avoid = list(avoid)
    while True:
        plan = chain.plan(held, target, without=without, avoid=avoid, pruned=pruned)
        lost = _lost(chain, plan, target, gone)
        if not lost:
            return plan
        avoid += lost


def is_reachable(chain: Chain, version: Version) -> bool:
    """Return whether a committed version can be rebuilt from nothing."""
    committed = chain.find(version)
    if committed is None:
        return False
    try:
        plan_present(chain, None, committed)
    except BrokenChainError:
        return False
    return True


def _lost(chain: Chain, plan: Plan, target: Committed, gone: Collection[str]) -> list[EdgeSummary]:
    """Return the edges of a plan that have lost their document or a part."""
    chain.look_ahead(plan)
    read = partial(_edge, chain, target)
    with Pool(READS) as pool:
        edges = list(zip(plan.edges, pool.map(read, plan.edges), strict=True))
    parts = {part.key: part.nbytes for _, edge in edges if edge for part in edge.parts}
    infos = chain.store.find_all(key for key in parts if key not in gone)
    found = {key: info.nbytes for key, info in infos.items()}
    return [
        summary
        for summary, edge in edges
        if edge is None or any(found.get(part.key) != part.nbytes for part in edge.parts)
    ]


def _edge(chain: Chain, target: Committed, summary: EdgeSummary) -> Edge | None:
    try:
        return chain.edge(summary, target)
    except (ObjectNotFoundError, FormatError):
        return None
