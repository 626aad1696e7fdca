"""Pruned payloads of a mirror: which ones go, and their deletion after a proof."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final

from deltachain.chain.chain import Chain
from deltachain.chain.reachable import plan_present
from deltachain.errors import FormatError, ObjectNotFoundError
from deltachain.format.documents import EdgeRecord, Head, dump, unseal
from deltachain.format.keys import HEAD_KEY, edge_key, version_of
from deltachain.format.prune_record import PruneRecord
from deltachain.mirror.plan import ObjectCopy
from deltachain.store import Store
from deltachain.threads import Pool
from deltachain.types import Version

DELETES: Final = 8
"""Objects deleted at a time."""


def is_pruned(copy: ObjectCopy, record: PruneRecord | None) -> bool:
    """Return whether a prune record names the edge of a payload."""
    version = version_of(copy.key)
    if record is None or copy.edge is None or version is None:
        return False
    edge = copy.edge
    return record.range_of(edge.kind, edge.base, version) is not None


def pruned_payloads(keys: Iterable[str], record: PruneRecord, now: float) -> frozenset[str]:
    """Return the parts of pruned deltas and anchors whose time has come.

    Args:
        keys: Keys of payloads.
        record: The newest prune record.
        now: Time of the store, in seconds since 1970.
    """
    return frozenset(
        key
        for key in keys
        for row in record.pruned
        if row.after <= now
        and row.span <= 1
        and key.startswith(f"{row.kind}s/")
        and row.first <= (version_of(key) or 0) <= row.last
    )


def pruned_skips(keys: Iterable[str], record: PruneRecord, now: float) -> frozenset[str]:
    """Return the keys of edge records of pruned skips whose time has come.

    Args:
        keys: Keys of payloads.
        record: The newest prune record.
        now: Time of the store, in seconds since 1970.
    """
    versions = {version_of(key) or 0 for key in keys if key.startswith("skips/")}
    return frozenset(
        edge_key(version, row.kind, version - row.span)
        for version in versions
        for row in record.pruned
        if row.span > 1 and row.after <= now and max(row.first, row.span) <= version <= row.last
    )


def delete_pruned(
    chain: Chain, source: Store, version: Version, record: PruneRecord, keys: Collection[str]
) -> frozenset[str]:
    """Delete payloads of a mirror that are pruned, and gone from the source; return their keys.

    Args:
        chain: The chain in the mirror.
        source: Store of the source.
        version: The newest version of the mirror.
        record: The newest prune record.
        keys: Payloads that a listing of the source does not have.

    Raises:
        BrokenChainError: No newcomer could reach the newest version; nothing was deleted.
    """
    soon = max((row.after for row in record.pruned), default=0.0)
    if not (pruned_payloads(keys, record, soon) or pruned_skips(keys, record, soon)):
        return frozenset()
    now = _time(chain.store, version)
    if now is None:
        return frozenset()
    now = min(now, record.time)  # a grace that no record ended may be taken back
    due = pruned_payloads(keys, record, now)
    due |= {
        part
        for place in pruned_skips(keys, record, now)
        for part in _parts(chain.store, place)
        if part in keys
    }
    due -= source.find_all(due).keys()
    if due:
        plan_present(chain, None, chain.read(version), gone=due)
        with Pool(DELETES, "deltachain-delete") as pool:
            for _ in pool.map(chain.store.delete, due):
                pass
    return frozenset(due)


def _time(store: Store, version: Version) -> float | None:
    """Return the time by the clock of the mirror, by a write of its head hint as it is."""
    try:
        hint = store.get(HEAD_KEY)
    except ObjectNotFoundError:
        hint = dump(Head(version=version))
    store.put(HEAD_KEY, hint)
    info = store.find(HEAD_KEY)
    return info.modified if info else None


def _parts(store: Store, place: str) -> Iterator[str]:
    """Yield the keys of the parts that an edge record names, if it is readable."""
    try:
        record = unseal(store.get(place), EdgeRecord, key=place)
    except (ObjectNotFoundError, FormatError):
        return
    yield from (part.key for part in record.edge.parts)
