"""Position at which a publisher continues: the chain, its identity, and its newest version."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from deltachain.chain import identity
from deltachain.chain.chain import Chain, Committed
from deltachain.chain.fetch import fetch
from deltachain.chain.head_hint import read_hint
from deltachain.chain.mirror_record import refuse_mirror
from deltachain.chain.trust import Trust
from deltachain.chain.write_access import check_signing_key
from deltachain.errors import (
    BrokenChainError,
    ConfigError,
    FormatError,
    MalformedError,
    ObjectNotFoundError,
)
from deltachain.format.digest import object_digest
from deltachain.format.documents import Identity, Manifest, Table, dump, unseal
from deltachain.format.keys import (
    CHAIN_KEY,
    TABLE_KEY,
    manifest_key,
    payload_prefix,
    version_of,
)
from deltachain.publish.model.kept_files import check_files
from deltachain.store import Store
from deltachain.types import Version

logger = logging.getLogger(__name__)

BLOCK_DIGITS: Final = 4
"""Digits of a block of 10,000 manifests; the hinted version's block and the next are listed."""

LEAPS: Final = 25
"""Number of probes at doubling distance for manifests beyond those blocks."""


def newest(chain: Chain) -> Committed | None:
    """Return the newest version, the parent of the next commit; ``None`` in a new chain.

    Manifests are listed, since no search finds those behind a gap, which would block a later
    commit. A version that has lost only its manifest is skipped, and so are missing versions below
    the hint: other publishers continued above them.

    Raises:
        BrokenChainError: There are versions behind a gap.
        ConfigError: The chain is signed, and the publisher has no signing key.
    """
    store, hinted = chain.store, read_hint(chain.store).version
    is_there = chain.has(hinted)
    known = _listed(store, hinted if is_there else None)
    if is_there:
        known.add(hinted)
    if not known:
        return None
    with suppress(BrokenChainError):  # a gap, handled below
        known.add(chain.newest(max(known)))
    first = hinted if is_there else min(known)
    passed = _check_gaps(chain, first, sorted(v for v in known if v >= first))
    last = chain.read(max(known))
    check_signing_key(chain, last)
    if first > 0 and not is_there:
        passed.append(f"0 to {first - 1}")
    if passed:
        logger.warning(
            "manifests are gone from %s, of versions %s: something deletes what must stay "
            "(FORMAT.md 1); going on behind version %d",
            store.url,
            ", ".join(passed),
            last.version,
        )
        chain.write_head(last.version, [])  # without it, newcomers search below the gap
    return last


def open_or_make(
    store: Store,
    table: Table,
    assets: Callable[[], Mapping[str, bytes]],
    *,
    trust: Trust,
    base: Path | None = None,
    by_state: bool = True,
) -> Chain:
    """Open the existing chain of this model, or create a new one.

    A lost identity is restored, with the id in the manifests, if this model's table is proven to be
    the chain's: the stored table still exists, or the newest version can be rebuilt with the
    model's table and has the state in its manifest.

    Args:
        store: Store of the chain.
        table: Table of this model.
        assets: Function that collects small files for the chain.
        trust: Keys of the publisher.
        base: Local folder of the base checkpoint, if the chain starts from one.
        by_state: Whether the newest version may prove the table. Its state does not depend on
            aliases and order, so the model must always have the same table.

    Raises:
        ChainMismatchError: The URL has the chain of another model, or one with other files.
        BrokenChainError: The identity is lost, and the chain is not proven to be of this model.
        SignatureError: No trusted key signed the existing chain.
        ConfigError: The store is the mirror of an unsigned chain.
    """
    refuse_mirror(store, trust)
    now, files = time.time(), assets()
    found = _identity_of_versions(store, trust)
    if found is None:
        chain = Chain.create(
            store, table, chain_id=uuid.uuid4().hex, time=now, assets=files, trust=trust
        )
        check_files(chain, files)
        return chain
    why = _why_not(store, table, found)
    if why and by_state and store.find(TABLE_KEY) is None:
        why = _why_not_rebuilt(store, table, found, base, trust)
    if why:
        raise BrokenChainError(
            f"the chain's identity is lost: {store.url} has no {CHAIN_KEY}, and this model cannot "
            f"be shown to be that of chain {found.chain}: {why}",
            hint=identity.WAY_OUT,
        )
    document = dump(table)
    if store.find(TABLE_KEY) is None:
        identity.put_back(store, {TABLE_KEY: document}, TABLE_KEY)
    identity.put(store, document, chain_id=found.chain, time=now, assets=files, trust=trust)
    logger.warning(
        "%s was gone from %s, and was made anew for chain %s: something deletes what must stay "
        "(FORMAT.md 1)",
        CHAIN_KEY,
        store.url,
        found.chain,
    )
    return Chain.open(store, trust)


def _listed(store: Store, hinted: Version | None) -> set[Version]:
    """List versions with manifests: near the hint and far beyond it, or all without a hint."""
    prefixes = {"manifests/"}
    if hinted is not None:
        cut = len(".json") + BLOCK_DIGITS
        prefixes = {manifest_key(v)[:-cut] for v in (hinted, hinted + 10**BLOCK_DIGITS)}
    found = {version_of(info.key) for prefix in prefixes for info in store.list(prefix)}
    known = {version for version in found if version is not None}
    if known:
        leaps = [manifest_key(max(known) + (1 << leap)) for leap in range(LEAPS)]
        known |= {v for v in map(version_of, store.find_all(leaps)) if v is not None}
    return known


def _check_gaps(chain: Chain, first: Version, known: list[Version]) -> list[str]:
    """Return the versions from ``first`` on that have lost only their manifests.

    Raises:
        BrokenChainError: Their payloads are lost too: the store went back below a later version.
    """
    expected, passed = first, list[str]()
    for version in known:
        while expected < version and chain.has(expected):  # a listing may be out of date
            expected += 1
        if expected < version:
            lost = f"{expected} to {version - 1}" if version - expected > 1 else str(expected)
            if next(iter(chain.store.list(payload_prefix("delta", expected))), None) is None:
                raise BrokenChainError(
                    f"{chain.store.url}: manifests of versions {lost} are missing, and there is "
                    f"one of version {version}: the store went back while a publisher was at work, "
                    "or lost them",
                    version=expected,
                    hint=f"put them back from a backup; or, to go on behind version {expected - 1},"
                    f" remove {manifest_key(version)} and every later manifest, and start again: "
                    "followers that were ahead then join again from nothing",
                )
            passed.append(lost)
        expected = version + 1
    return passed


def _identity_of_versions(store: Store, trust: Trust) -> Manifest | None:
    """Return the newest manifest of a chain without identity; ``None`` for any other chain.

    Raises:
        BrokenChainError: The manifests belong to two chains.
        SignatureError: No trusted key signed the newest manifest.
    """
    if store.find(CHAIN_KEY) is not None:
        return None
    versions = [version_of(info.key) for info in store.list("manifests/")]
    known = sorted(version for version in versions if version is not None)
    if not known or store.find(CHAIN_KEY) is not None:  # created before any manifest
        return None
    first, last = _read(store, known[0], Trust()), _read(store, known[-1], trust)
    if first.chain != last.chain:
        raise BrokenChainError(
            f"the chain's identity is lost: {store.url} has no {CHAIN_KEY}, and versions of two "
            f"chains: version {known[0]} of {first.chain}, version {known[-1]} of {last.chain}",
            hint=f"put {CHAIN_KEY} back from a backup, and remove the manifests of the other chain",
        )
    return last


def _read(store: Store, version: Version, trust: Trust) -> Manifest:
    key = manifest_key(version)
    data = store.get(key)
    found = unseal(data, Manifest, key=key)
    trust.check(data, Manifest, chain=found.chain, key=key)
    if found.version != version:
        raise MalformedError(f"{key}: is version {found.version} of chain {found.chain}", key=key)
    return found


def _why_not(store: Store, table: Table, newest: Manifest) -> str:
    """Return why a table is not proven to be the chain's; empty if it is."""
    numel = sum(spec.numel for spec in table.specs())
    if numel != newest.numel:
        return f"it has {numel} elements, version {newest.version} has {newest.numel}"
    try:
        return "" if store.get(TABLE_KEY) == dump(table) else f"its table is not {TABLE_KEY}"
    except ObjectNotFoundError:
        return f"{TABLE_KEY} is gone too"


def _why_not_rebuilt(
    store: Store, table: Table, newest: Manifest, base: Path | None, trust: Trust
) -> str:
    """Return why the newest version cannot be rebuilt with a table; empty if it can."""
    supposed = Identity(chain=newest.chain, created=0.0, table=object_digest(dump(table)))
    chain = Chain(store, supposed, table, trust=trust)
    if sum(spec.numel for spec in table.specs()) != newest.numel:
        return _why_not(store, table, newest)
    try:
        committed = chain.read(newest.version)
        state = fetch(chain, chain.plan(None, committed), base=base).state()
    except (BrokenChainError, ObjectNotFoundError, FormatError, ConfigError) as exc:
        return f"{TABLE_KEY} is gone too, and version {newest.version} cannot be rebuilt: {exc}"
    if state != committed.state:
        return f"version {newest.version}, rebuilt with its tensors, has another state"
    return ""
