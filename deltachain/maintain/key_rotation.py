"""Rotation of signing keys: records that must be signed again before an old key is taken out."""

from __future__ import annotations

from msgspec.structs import replace

from deltachain.chain import tags
from deltachain.chain.chain import Chain
from deltachain.chain.heartbeat import newest_prune
from deltachain.chain.reachable import check_write_access
from deltachain.errors import AlreadyExistsError, ConfigError
from deltachain.format.documents import Document, PruneRecord, Tag
from deltachain.format.keys import prune_key, tag_key


def sign_again(chain: Chain) -> tuple[str, ...]:
    """Write tags and the newest prune record again that this process's key did not sign.

    Each is written under its next number. A record that another process replaces at the same time
    is left to it: call again. Edge records keep their signatures, since they are written once.

    Args:
        chain: The chain, opened with a signing key, and with the old key among the trusted ones.

    Returns:
        Keys of the records that were written.

    Raises:
        ConfigError: There is no signing key, or the store is a mirror.
        SignatureError: No trusted key signed a record.
        StaleChainError: The store shows an older record than its heartbeat names.
    """
    check_write_access(chain)
    if chain.trust.key is None:
        raise ConfigError("no signing key is given", hint="set DELTACHAIN_SIGNING_KEY")
    written = [
        tag_key(tag.name, tag.number + 1)
        for tag in tags.newest_records(chain)
        if not _is_own(chain, tag_key(tag.name, tag.number), Tag) and tags.put_after(chain, tag)
    ]
    record = newest_prune(chain)
    if record is not None and not _is_own(chain, prune_key(record.number), PruneRecord):
        key = prune_key(record.number + 1)
        again = replace(record, number=record.number + 1)
        try:
            chain.store.put_if_absent(key, chain.trust.seal(again, chain.identity.chain))
        except AlreadyExistsError:
            return tuple(written)
        written.append(key)
    return tuple(written)


def _is_own(chain: Chain, key: str, kind: type[Document]) -> bool:
    """Return whether the signing key of this process signed a record."""
    signers = chain.trust.signers(chain.store.get(key), kind, chain.identity.chain)
    own = chain.trust.key
    return own is not None and own.public.key_id in signers
