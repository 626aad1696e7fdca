"""A plan's objects in memory, for tests that look at them one by one."""

from pathlib import Path

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.fetch import Fetched, fetching
from deltachain.chain.plan import Plan


def fetch(
    chain: Chain,
    plan: Plan,
    *,
    target: Committed | None = None,
    base: Path | None = None,
) -> Fetched:
    """Fetch and verify every object of a plan.

    A corrupt object is fetched once more before it is refused.
    """
    with fetching(chain, plan, target=target, base=base) as fetched:
        fetched.parts  # noqa: B018 - waits for all
    return fetched
