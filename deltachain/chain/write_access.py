"""Checks before anything is added to a chain: the store is no mirror, and the writer has a key."""

from __future__ import annotations

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.mirror_record import refuse_mirror
from deltachain.errors import ConfigError


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
