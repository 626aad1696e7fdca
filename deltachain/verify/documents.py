"""Consistency checks between the documents of a chain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.plan import Plan
from deltachain.errors import (
    BrokenChainError,
    ChainError,
    DigestMismatchError,
    ForkedChainError,
    FormatError,
    MalformedError,
    ObjectNotFoundError,
    SignatureError,
)
from deltachain.format import keys
from deltachain.format.digest import object_digest
from deltachain.format.documents import EdgeRecord, EdgeSummary, summarise, unseal
from deltachain.types import Version


def newest(chain: Chain) -> Version:
    """Return the newest version with a manifest, even behind a gap.

    Raises:
        ChainError: The chain has no version.
    """
    listed = [keys.version_of(info.key) for info in chain.store.list("manifests/")]
    head = chain.head()
    known = [version for version in listed if version is not None]
    known += [head.version] if head else []
    if not known:
        raise ChainError(f"{chain.store.url} has no version yet")
    return max(known)


def history(chain: Chain, first: Version, last: Version) -> Iterator[Committed]:
    """Yield manifests in order; the hint of an error names the version to verify from.

    Raises:
        BrokenChainError: A manifest is missing, or names another parent.
        FormatError: A manifest is damaged, or has the key of another version.
    """
    try:
        yield from chain.history(first, last)
    except BrokenChainError as exc:
        version = first if exc.version is None else exc.version
        lost = version if chain.find(version) is None else version - 1
        back = f"restore {keys.manifest_key(lost)} from a backup"
        exc.hint = way_behind(chain, back, lost, last)
        raise
    except FormatError as exc:
        at = keys.version_of(exc.key)
        if at is not None:
            exc.hint = way_behind(chain, exc.hint, at, last)
        raise


def way_behind(chain: Chain, back: str, lost: Version, last: Version) -> str:
    """Return the hint for a lost document.

    Args:
        chain: The chain.
        back: How to restore it.
        lost: Its version.
        last: The last version to verify.
    """
    for version in range(lost + 1, last + 1):
        with suppress(BrokenChainError, FormatError, ObjectNotFoundError):
            plan_from_nothing(chain, chain.read(version), [])
            url = chain.store.url
            return f"{back}; `deltachain verify {url} --from {version}` verifies later versions"
    return f"{back}; no later version can be rebuilt: publish an anchor"


def plan_from_nothing(chain: Chain, committed: Committed, avoid: list[EdgeSummary]) -> Plan:
    """Find the cheapest plan from nothing whose documents exist; add other edges to ``avoid``.

    Raises:
        BrokenChainError: No plan exists.
    """
    while True:
        plan = chain.plan(None, committed, avoid=avoid)
        lost = [edge for edge in plan.edges if not _is_there(chain, edge)]
        if not lost:
            return plan
        avoid += lost


def _is_there(chain: Chain, edge: EdgeSummary) -> bool:
    try:
        chain.edge(edge)
    except ObjectNotFoundError:
        return False
    return True


def edge_records(
    chain: Chain, first: Version, last: Version
) -> tuple[tuple[EdgeRecord, EdgeSummary], ...]:
    """Read all edge records of a range of versions, oldest first, listed in a manifest or not.

    Raises:
        MalformedError: A record has the key of another edge.
        SignatureError: No trusted key signed a record, and no manifest lists it.
    """
    found = []
    for info in chain.store.list("edges/"):
        version = keys.version_of(info.key)
        if version is None or not first <= version <= last:
            continue
        data = bytes(chain.store.read(info.key, nbytes=info.nbytes, pin=info.pin))
        record = unseal(data, EdgeRecord, key=info.key)
        edge = record.edge
        place = keys.edge_key(record.version, edge.kind, edge.base)
        if record.chain != chain.identity.chain or place != info.key:
            raise MalformedError(f"{info.key}: is {place} of chain {record.chain}", key=info.key)
        digest = object_digest(data)
        _check_signed(chain, data, info.key, version)
        summary = summarise(version, edge, record.state, record=info.key, digest=digest)
        found.append((record, summary))
    return tuple(found)


def _check_signed(chain: Chain, data: bytes, key: str, version: Version) -> None:
    """Raise unless a record is signed, or a later manifest lists it; these are read if needed."""
    try:
        chain.check_listed(data, key)
    except SignatureError:
        digest, later = object_digest(data), version + 1
        while (committed := chain.find(later)) is not None:
            if any(edge.digest == digest for edge in committed.manifest.recent):
                return
            later += 1
        raise


def check_manifest(chain: Chain, committed: Committed, before: Committed | None) -> None:
    """Check a manifest against its parent and the table."""
    manifest, key = committed.manifest, keys.manifest_key(committed.version)
    numel = sum(spec.numel for spec in chain.table.specs())
    if manifest.numel != numel:
        raise MalformedError(f"{key}: {manifest.numel} elements, the table has {numel}", key=key)
    if manifest.edge.kind == "delta" and manifest.edge.base != committed.version - 1:
        raise MalformedError(f"{key}: its delta starts from {manifest.edge.base}", key=key)
    if committed.version == 0 and (manifest.parent or manifest.base_state):
        raise MalformedError(f"{key}: version 0 has a parent", key=key)
    if before is None:
        return
    if manifest.epoch < before.manifest.epoch:
        raise ForkedChainError(
            f"{key}: epoch {manifest.epoch} after epoch {before.manifest.epoch}",
            version=committed.version,
        )
    if manifest.base_state != before.manifest.state:
        raise another(f"{key}: base state", before.state, manifest.base_state, key=key)


def check_record(record: EdgeRecord, key: str, committed: Committed) -> None:
    """Check that an edge record names the committed manifest and state."""
    if record.manifest != committed.digest:
        raise another(f"{key}: manifest", committed.digest, record.manifest, key=key)
    if record.state != committed.manifest.state:
        raise another(f"{key}: state", committed.state, record.state, key=key)


def another(what: str, expected: object, actual: object, *, key: str) -> DigestMismatchError:
    """Build the error for a value that differs from the expected one."""
    return DigestMismatchError(what, expected=str(expected), actual=str(actual), key=key)
