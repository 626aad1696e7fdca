"""The identity of a chain and its table, as a store has them."""

from __future__ import annotations

from deltachain.digest import object_digest
from deltachain.errors import DigestMismatchError, MalformedError, ObjectNotFoundError
from deltachain.keys import CHAIN_KEY, TABLE_KEY
from deltachain.manifest import Identity, Table, parse
from deltachain.references import check_assets
from deltachain.store import ObjectInfo, Store
from deltachain.store.base import not_found


def lost_chain(url: str) -> ObjectNotFoundError:
    """Build the error for a chain whose identity is not where it was."""
    return ObjectNotFoundError(
        f"the chain that was at {url} is lost: {CHAIN_KEY} is gone",
        key=CHAIN_KEY,
        hint="a folder that is not mounted, a bucket that was emptied, a rule that removes old "
        f"objects? Put {CHAIN_KEY} back; a publisher that runs does so by itself",
    )


def read_model(store: Store) -> tuple[Identity, Table, ObjectInfo | None]:
    """The identity, its table, and what the store says of the identity where others replace it."""
    seen = None
    try:
        if store.capabilities.conditional_put:
            data = store.get(CHAIN_KEY)
        elif seen := store.find(CHAIN_KEY):
            data = bytes(store.read(CHAIN_KEY, nbytes=seen.nbytes, xet_hash=seen.xet_hash))
        else:
            raise not_found(CHAIN_KEY, store.url)
    except ObjectNotFoundError as exc:
        exc.hint = "no publisher has made a chain here yet; check the URL"
        raise
    identity = check_assets(parse(data, Identity, key=CHAIN_KEY))
    document = store.get(TABLE_KEY)
    check_digest(document, identity.table, TABLE_KEY)
    table = parse(document, Table, key=TABLE_KEY)
    try:
        table.specs()
    except ValueError as exc:
        raise MalformedError(f"{TABLE_KEY}: {exc}", key=TABLE_KEY) from exc
    return identity, table, seen


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
