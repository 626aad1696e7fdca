"""Edge records under known keys, summarised for planning."""

from __future__ import annotations

from deltachain.chain.trust import Trust
from deltachain.errors import FormatError, ObjectNotFoundError
from deltachain.format.digest import object_digest
from deltachain.format.documents import EdgeRecord, EdgeSummary, summarise, unseal
from deltachain.format.keys import edge_key
from deltachain.store import Store


def read_summary(store: Store, key: str, *, chain: str, trust: Trust) -> EdgeSummary | None:
    """Read an edge record and summarise its edge.

    Args:
        store: Store of the record.
        key: Key of the record.
        chain: Id of the chain.
        trust: Keys that sign and check records.

    Returns:
        The summary, with the digest of the bytes that were read; ``None`` if the record is missing,
        damaged, under the key of another, or not signed by a trusted key.
    """
    try:
        data = store.get(key)
        record = unseal(data, EdgeRecord, key=key)
        trust.check(data, EdgeRecord, chain=chain, key=key)
    except (ObjectNotFoundError, FormatError):
        return None
    edge = record.edge
    if record.chain != chain or edge_key(record.version, edge.kind, edge.base) != key:
        return None
    return summarise(record.version, edge, record.state, record=key, digest=object_digest(data))
