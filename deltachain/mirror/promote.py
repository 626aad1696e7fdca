"""End of a mirror, so that a publisher may go on there."""

from __future__ import annotations

from deltachain.chain.chain import Chain
from deltachain.chain.identity import read_mirror
from deltachain.chain.reachable import plan_present
from deltachain.errors import ChainMismatchError, ConfigError, no_version
from deltachain.format.keys import MIRROR_KEY
from deltachain.store import Store
from deltachain.types import Version


def promote(store: Store) -> Version:
    """End a mirror, so that a publisher may go on there; return its newest version.

    Stop copying into it first. What the mirror left out then counts as expired.

    Raises:
        ConfigError: The store is no mirror.
        BrokenChainError: No newcomer could join it.
        ChainMismatchError: It mirrors another chain than it has.
    """
    record = read_mirror(store)
    if record is None:
        raise ConfigError(
            f"{store.url} is no mirror: it has no {MIRROR_KEY}",
            hint="publishers may go on there already, or the URL is another one",
        )
    chain = Chain.open(store)
    if chain.identity.chain != record.chain:
        raise ChainMismatchError(
            f"{store.url} mirrors chain {record.chain}, but has {chain.identity.chain}",
            hint="run `deltachain verify` there: something else has written to it",
        )
    head = chain.head()
    if head is None:
        raise no_version(store.url, "mirror the chain first")
    plan_present(chain, None, head)
    store.delete(MIRROR_KEY)
    return head.version
