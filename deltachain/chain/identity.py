"""What makes a URL a chain: ``chain.json`` and the table, made once, never where versions are.

Whoever opened a chain holds the exact bytes of both, and can put them back.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final, TypeAlias

from deltachain.chain.checks import check_assets
from deltachain.errors import (
    AlreadyExistsError,
    BrokenChainError,
    ChainMismatchError,
    DigestMismatchError,
    FormatError,
    MalformedError,
    ObjectNotFoundError,
)
from deltachain.format.digest import object_digest
from deltachain.format.documents import Identity, ObjectRef, Table, dump, parse
from deltachain.format.keys import CHAIN_KEY, HEAD_KEY, TABLE_KEY, asset_key, manifest_key
from deltachain.store import ObjectInfo, Store
from deltachain.store.base import not_found

logger = logging.getLogger(__name__)

Model: TypeAlias = tuple[Identity, Table, ObjectInfo | None, Mapping[str, bytes]]
"""Identity and table; what the store says of the identity, where others replace it; their bytes."""

WAY_OUT: Final = (
    f"put {CHAIN_KEY} back from a backup; or start the trainer that published here again: it makes "
    "one anew if its model provably is this chain's. A new chain needs a URL of its own; where no "
    f"manifest is left, remove {HEAD_KEY} to begin one here"
)
"""What to do where versions are and the identity is not."""

DAMAGED: Final = (
    f"one of {CHAIN_KEY} and {TABLE_KEY} is damaged: put both back from a backup, or remove both "
    "and start the publisher again, which makes them anew"
)
"""What to do where the two do not go together, or one cannot be read."""


def lost_chain(url: str) -> ObjectNotFoundError:
    """Build the error for a chain whose identity is not where it was."""
    return ObjectNotFoundError(
        f"the chain that was at {url} is lost: {CHAIN_KEY} is gone",
        key=CHAIN_KEY,
        hint="a folder that is not mounted, a bucket that was emptied, a rule that removes old "
        f"objects? Put {CHAIN_KEY} back, which a publisher that runs does by itself; or start the "
        "publisher again: where nothing is left it makes a new chain, which replicas join from "
        "nothing",
    )


def read_model(store: Store) -> Model:
    """Read both documents.

    Raises:
        ObjectNotFoundError: There is no chain yet, or its identity or its table is lost.
        FormatError: One is not readable by this version, or not what it says.
    """
    seen = None
    try:
        if store.capabilities.conditional_put:
            data = store.get(CHAIN_KEY)
        elif seen := store.find(CHAIN_KEY):
            data = bytes(store.read(CHAIN_KEY, nbytes=seen.nbytes, xet_hash=seen.xet_hash))
        else:
            raise not_found(CHAIN_KEY, store.url)
    except ObjectNotFoundError as exc:
        if _has_traces(store):
            lost = _lost(store)
            raise ObjectNotFoundError(str(lost.args[0]), key=CHAIN_KEY, hint=lost.hint) from exc
        exc.hint = "no publisher has made a chain here yet; check the URL"
        raise
    try:
        identity = check_assets(parse(data, Identity, key=CHAIN_KEY))
    except MalformedError as exc:
        exc.hint = DAMAGED
        raise
    document, table = _read_table(store, identity)
    return identity, table, seen, {CHAIN_KEY: data, TABLE_KEY: document}


def _read_table(store: Store, identity: Identity) -> tuple[bytes, Table]:
    """The table that an identity names, and its bytes."""
    try:
        document = store.get(TABLE_KEY)
        check_digest(document, identity.table, TABLE_KEY)
    except ObjectNotFoundError as exc:
        raise ObjectNotFoundError(
            f"{TABLE_KEY} of chain {identity.chain} is lost: {store.url} has its {CHAIN_KEY}",
            key=TABLE_KEY,
            url=store.url,
            hint="put it back from a backup; a publisher that is open, or a trainer of the same "
            "model that is started again, puts it back",
        ) from exc
    except DigestMismatchError as exc:
        exc.hint = DAMAGED
        raise
    table = parse(document, Table, key=TABLE_KEY)
    try:
        table.specs()
    except ValueError as exc:
        raise MalformedError(f"{TABLE_KEY}: {exc}", key=TABLE_KEY) from exc
    return document, table


def make(
    store: Store, table: Table, *, chain_id: str, time: float, assets: Mapping[str, bytes]
) -> Model:
    """Make the identity, or read the one that is there if it is of the same model.

    Of racing callers with equal tables all get the same one. A table that is lost is put back.

    Raises:
        ChainMismatchError: The URL holds the chain of another model.
        BrokenChainError: There are versions here, and their identity is lost.
    """
    document = dump(table)
    if store.find(CHAIN_KEY) is not None:
        return _read_same(store, document)
    if has_versions(store):  # whoever makes a chain puts its identity before any version
        if store.find(CHAIN_KEY) is None:
            raise _lost(store)
        return _read_same(store, document)
    try:
        store.put_if_absent(TABLE_KEY, document)
    except AlreadyExistsError:
        if store.get(TABLE_KEY) != document:
            raise _another_model(store, table) from None
    return put(store, document, chain_id=chain_id, time=time, assets=assets)


def put(
    store: Store, document: bytes, *, chain_id: str, time: float, assets: Mapping[str, bytes]
) -> Model:
    """Put an identity beside a table that is there, unless there is one.

    Args:
        store: Where.
        document: The table's bytes.
        chain_id: Id of the chain.
        time: Now, in seconds since 1970.
        assets: Small files of the checkpoint.
    """
    refs = tuple(_put_asset(store, name, data) for name, data in sorted(assets.items()))
    identity = Identity(chain=chain_id, created=time, table=object_digest(document), assets=refs)
    data = dump(identity)
    try:
        store.put_if_absent(CHAIN_KEY, data)
    except AlreadyExistsError:
        return read_model(store)
    if not store.capabilities.conditional_put:
        return read_model(store)  # another may have made one since we looked
    table = parse(document, Table, key=TABLE_KEY)
    return identity, table, None, {CHAIN_KEY: data, TABLE_KEY: document}


def has_versions(store: Store) -> bool:
    """Whether any version was ever committed here, as far as a hint and a listing tell."""
    return _has_traces(store) or next(iter(store.list("manifests/")), None) is not None


def put_back(store: Store, documents: Mapping[str, bytes], key: str) -> bool:
    """Put a document of the identity back where it is gone; whether it was."""
    try:
        store.put_if_absent(key, documents[key])
    except AlreadyExistsError:
        return False
    logger.warning(
        "%s was gone from %s and was put back: something deletes what must stay (FORMAT.md 1)",
        key,
        store.url,
    )
    return True


def is_same(store: Store, opened: Identity, documents: Mapping[str, bytes]) -> bool:
    """Whether the identity in a store is of the same chain; put back where it is damaged.

    Args:
        store: Where.
        opened: The identity of the chain that was opened.
        documents: Its exact bytes.
    """
    try:
        there = parse(store.get(CHAIN_KEY), Identity, key=CHAIN_KEY)
    except ObjectNotFoundError:
        return True
    except MalformedError:
        replace(store, documents, CHAIN_KEY)
        return True
    except FormatError as exc:
        logger.warning("nobody can join: %s", exc)
        return True
    if there.chain == opened.chain and there.table != opened.table:  # a chain has one table
        replace(store, documents, CHAIN_KEY)
        return True
    return there.chain == opened.chain


def replace(store: Store, documents: Mapping[str, bytes], key: str) -> None:
    """Write a document of the identity again where it is damaged."""
    store.put(key, documents[key])
    logger.warning("%s was damaged at %s, and was put back", key, store.url)


def identity_there(store: Store) -> str | None:
    """Id of the chain that is there now, if one is."""
    try:
        return parse(store.get(CHAIN_KEY), Identity, key=CHAIN_KEY).chain
    except ObjectNotFoundError:
        return None


def check_digest(data: bytes, expected: str, key: str) -> None:
    """Refuse an object that is not the one that its digest names.

    Raises:
        DigestMismatchError: It is not.
    """
    actual = object_digest(data)
    if actual != expected:
        raise DigestMismatchError(key, expected=expected, actual=actual, key=key)


def _lost(store: Store) -> BrokenChainError:
    return BrokenChainError(
        f"the chain's identity is lost: {store.url} has versions, and no {CHAIN_KEY}", hint=WAY_OUT
    )


def _has_traces(store: Store) -> bool:
    return bool(store.find_all([HEAD_KEY, manifest_key(0)]))


def _read_same(store: Store, document: bytes) -> Model:
    """The identity that is there, once it is of the model with this table."""
    try:
        opened = read_model(store)
    except ObjectNotFoundError as exc:
        if exc.key != TABLE_KEY:
            raise
        identity = parse(store.get(CHAIN_KEY), Identity, key=CHAIN_KEY)
        if identity.table != object_digest(document):
            raise ChainMismatchError(
                f"{store.url} holds chain {identity.chain}, whose {TABLE_KEY} is lost: "
                "this model has another table",
                hint=exc.hint,
            ) from exc
        put_back(store, {TABLE_KEY: document}, TABLE_KEY)
        opened = read_model(store)
    if opened[3][TABLE_KEY] != document:
        raise _another_model(store, parse(document, Table, key=TABLE_KEY))
    return opened


def _put_asset(store: Store, name: str, data: bytes) -> ObjectRef:
    digest = object_digest(data)
    key = asset_key(digest, name)
    return ObjectRef(key=key, nbytes=len(data), blake3=digest, xet_hash=store.put(key, data))


def _another_model(store: Store, table: Table) -> ChainMismatchError:
    """Say which tensor tells the two models apart."""
    there = parse(store.get(TABLE_KEY), Table, key=TABLE_KEY)
    different = set(there.tensors) ^ set(table.tensors)
    example = min(different, default=("aliases", "", ()))
    return ChainMismatchError(
        f"{store.url} holds a chain of another model: {len(there.tensors)} tensors, "
        f"this one has {len(table.tensors)}; for example {example}"
    )
