"""Identity of a chain: ``chain.json`` and the table, created once, before any version.

An open chain keeps the exact bytes of both documents and can restore them.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from deltachain import errors
from deltachain.chain.checks import ASSET_PATH, check_assets, check_digest, check_paths
from deltachain.chain.trust import Trust
from deltachain.format import keys
from deltachain.format.documents import Count, Document, Identity, ObjectRef, Table, dump, parse
from deltachain.redact import printable, redacted_url
from deltachain.store import ObjectInfo, Store
from deltachain.store.base import not_found
from deltachain.types import Version

_told: Final[set[str]] = set()
"""URLs of which a record was told: a maintainer looks before all that it writes."""


class MirrorRecord(Document, frozen=True, kw_only=True):
    """What a store mirrors, and what it leaves out."""

    chain: str
    source: str
    first: Count = 0
    writer: str = ""


def read_mirror(store: Store) -> MirrorRecord | None:
    try:
        return parse(store.get(keys.MIRROR_KEY), MirrorRecord, key=keys.MIRROR_KEY)
    except errors.ObjectNotFoundError:
        return None


def refuse_mirror(store: Store, trust: Trust) -> None:
    """Raise if a store is a mirror, which holds what its source holds and nothing else.

    The record is not signed. Where signatures decide who writes, it is told and decides nothing.
    """
    is_signed = trust.key is not None and trust.trusted is not None
    try:
        record = read_mirror(store)
    except errors.FormatError as exc:
        if not is_signed:
            raise
        found = f"has {keys.MIRROR_KEY}, which is damaged: {exc.args[0]}"
    else:
        if record is None:
            return
        found = f"is a mirror of {redacted_url(printable(record.source))}"
    way_out = f"end the mirror by `deltachain mirror --promote {store.url}`"
    if not is_signed:
        raise errors.ConfigError(
            f"{store.url} {found}: nothing is written there but by the mirror",
            hint=f"write to its source; or, if this store takes its place, {way_out}",
        )
    if store.url not in _told:
        _told.add(store.url)
        logger.warning(
            "%s %s, says a record that nobody signed; going on with the signing key. If it is one, "
            "stop this writer and use its source; if this store takes its place, %s",
            store.url,
            found,
            way_out,
        )


logger = logging.getLogger(__name__)

Model: TypeAlias = tuple[Identity, Table, ObjectInfo | None, Mapping[str, bytes]]
"""Identity, table, metadata of the identity if it is replaceable, exact bytes of both by key."""

RECIPE: Final = "quantization"
"""Entry of a table's ``ext``: recipe, library and version that quantised the weights."""

OTHER_LAYERS: Final = (
    "give the publisher the same model, and leave the same layers as they are (ignore); or give it "
    "a URL of its own"
)
"""Hint for another table of a chain whose weights are quantised."""

WAY_OUT: Final = (
    f"restore {keys.CHAIN_KEY} from a backup; or restart the trainer that published here: it "
    "recreates the file if its model is proven to be this chain's. A new chain needs a URL of its "
    f"own; if no manifest is left, remove {keys.HEAD_KEY} to create one here"
)
"""Hint for a store with versions but without an identity."""

DAMAGED: Final = (
    f"{keys.CHAIN_KEY} or {keys.TABLE_KEY} is damaged: restore both from a backup, or remove both "
    "and restart the publisher, which recreates them"
)
"""Hint for an unreadable document, or a table that does not match the identity."""


def lost_chain(url: str) -> errors.ObjectNotFoundError:
    return errors.ObjectNotFoundError(
        f"the chain that was at {url} is lost: {keys.CHAIN_KEY} is gone",
        key=keys.CHAIN_KEY,
        hint="possible causes: an unmounted folder, an emptied bucket, a lifecycle rule. Restore "
        f"{keys.CHAIN_KEY} (a running publisher does so by itself), or restart the publisher: if "
        "nothing is left, it creates a new chain, which replicas join from nothing",
    )


def read_model(store: Store, trust: Trust) -> Model:
    seen = None
    try:
        if store.capabilities.conditional_put:
            data = store.get(keys.CHAIN_KEY)
        elif seen := store.find(keys.CHAIN_KEY):
            data = bytes(store.read(keys.CHAIN_KEY, nbytes=seen.nbytes, pin=seen.pin))
        else:
            raise not_found(keys.CHAIN_KEY, store.url)
    except errors.ObjectNotFoundError as exc:
        if _has_traces(store):
            lost = _lost(store)
            raise errors.ObjectNotFoundError(
                str(lost.args[0]), key=keys.CHAIN_KEY, hint=lost.hint
            ) from exc
        raise errors.NoChainError(
            str(exc.args[0]),
            key=keys.CHAIN_KEY,
            url=store.url,
            hint="no publisher has created a chain here yet; check the URL",
        ) from exc
    try:
        identity = check_assets(parse(data, Identity, key=keys.CHAIN_KEY))
    except errors.MalformedError as exc:
        exc.hint = DAMAGED
        raise
    trust.check_identity(store, identity.chain, data)
    document, table = _read_table(store, identity)
    return identity, table, seen, {keys.CHAIN_KEY: data, keys.TABLE_KEY: document}


def _read_table(store: Store, identity: Identity) -> tuple[bytes, Table]:
    try:
        document = store.get(keys.TABLE_KEY)
        check_digest(document, identity.table, keys.TABLE_KEY)
    except errors.ObjectNotFoundError as exc:
        raise errors.ObjectNotFoundError(
            f"{keys.TABLE_KEY} of chain {identity.chain} is lost: {store.url} has only its "
            f"{keys.CHAIN_KEY}",
            key=keys.TABLE_KEY,
            url=store.url,
            hint="restore it from a backup; a running publisher, or a restarted trainer of the "
            "same model, restores it by itself",
        ) from exc
    except errors.DigestMismatchError as exc:
        exc.hint = DAMAGED
        raise
    table = parse(document, Table, key=keys.TABLE_KEY)
    try:
        table.specs()
    except ValueError as exc:
        raise errors.MalformedError(f"{keys.TABLE_KEY}: {exc}", key=keys.TABLE_KEY) from exc
    return document, table


def make(
    store: Store,
    table: Table,
    *,
    chain_id: str,
    time: float,
    assets: Mapping[str, bytes],
    trust: Trust,
) -> Model:
    """Create the identity, or read an existing one of the same model.

    Racing callers with equal tables get the same identity. A lost table is restored.
    """
    document = dump(table)
    if store.find(keys.CHAIN_KEY) is not None:
        return _read_same(store, document, trust)
    if has_versions(store):  # the identity of a chain is always put before its first version
        if store.find(keys.CHAIN_KEY) is None:
            raise _lost(store)
        return _read_same(store, document, trust)
    try:
        store.put_if_absent(keys.TABLE_KEY, document)
    except errors.AlreadyExistsError:
        if store.get(keys.TABLE_KEY) != document:
            raise _another_model(store, table) from None
    return put(store, document, chain_id=chain_id, time=time, assets=assets, trust=trust)


def put(
    store: Store,
    document: bytes,
    *,
    chain_id: str,
    time: float,
    assets: Mapping[str, bytes],
    trust: Trust,
) -> Model:
    """Put an identity for an existing table, unless there is one."""
    check_paths(assets)
    refs = tuple(_put_asset(store, name, data) for name, data in sorted(assets.items()))
    identity = Identity(
        chain=chain_id, created=time, table=keys.object_digest(document), assets=refs
    )
    data = dump(identity)
    for key, signature in trust.sign_identity(chain_id, data).items():
        store.put(key, signature)
    try:
        store.put_if_absent(keys.CHAIN_KEY, data)
    except errors.AlreadyExistsError:
        return read_model(store, trust)
    if not store.capabilities.conditional_put:
        return read_model(store, trust)  # another publisher may have created one since the check
    table = parse(document, Table, key=keys.TABLE_KEY)
    return identity, table, None, {keys.CHAIN_KEY: data, keys.TABLE_KEY: document}


def chain_around(folder: Path) -> Path | None:
    here = folder.absolute()
    return next((one for one in (here, *here.parents) if (one / keys.CHAIN_KEY).is_file()), None)


def has_versions(store: Store) -> bool:
    return _has_traces(store) or next(iter(store.list("manifests/")), None) is not None


def put_back(store: Store, documents: Mapping[str, bytes], key: str) -> bool:
    """Restore a document of the identity if it is missing; return whether it was."""
    try:
        store.put_if_absent(key, documents[key])
    except errors.AlreadyExistsError:
        return False
    logger.warning(
        "%s was missing from %s and was restored: objects are deleted that must stay (FORMAT.md 1)",
        key,
        store.url,
    )
    return True


def is_same(store: Store, opened: Identity, documents: Mapping[str, bytes]) -> bool:
    """Return whether the identity in a store is of the same chain; restore it if damaged."""
    try:
        there = parse(store.get(keys.CHAIN_KEY), Identity, key=keys.CHAIN_KEY)
    except errors.ObjectNotFoundError:
        return True
    except errors.MalformedError:
        replace(store, documents, keys.CHAIN_KEY)
        return True
    except errors.FormatError as exc:
        logger.warning("no subscriber can join: %s", exc)
        return True
    if there.chain == opened.chain and there.table != opened.table:  # a chain has one table
        replace(store, documents, keys.CHAIN_KEY)
        return True
    return there.chain == opened.chain


def replace(store: Store, documents: Mapping[str, bytes], key: str) -> None:
    store.put(key, documents[key])
    logger.warning("%s was damaged in %s and was restored", key, store.url)


def identity_there(store: Store) -> str | None:
    try:
        return parse(store.get(keys.CHAIN_KEY), Identity, key=keys.CHAIN_KEY).chain
    except errors.ObjectNotFoundError:
        return None


def replaced(url: str, there: str, known: str, version: Version) -> errors.ChainMismatchError:
    """Build the error for a chain that took the place of another one."""
    return errors.ChainMismatchError(
        f"two chains were at {url}: {keys.CHAIN_KEY} names {there}, but {known}",
        version=version,
        hint="decide which one is right, and give the other a URL of its own; replicas join the "
        "one that is there from nothing",
    )


def _lost(store: Store) -> errors.BrokenChainError:
    return errors.BrokenChainError(
        f"the chain's identity is lost: {store.url} has versions but no {keys.CHAIN_KEY}",
        hint=WAY_OUT,
    )


def _has_traces(store: Store) -> bool:
    return bool(store.find_all([keys.HEAD_KEY, keys.manifest_key(0)]))


def _read_same(store: Store, document: bytes, trust: Trust) -> Model:
    try:
        opened = read_model(store, trust)
    except errors.ObjectNotFoundError as exc:
        if exc.key != keys.TABLE_KEY:
            raise
        identity = parse(store.get(keys.CHAIN_KEY), Identity, key=keys.CHAIN_KEY)
        if identity.table != keys.object_digest(document):
            raise errors.ChainMismatchError(
                f"{store.url} holds chain {identity.chain}, whose {keys.TABLE_KEY} is lost: "
                "this model has another table",
                hint=exc.hint,
            ) from exc
        put_back(store, {keys.TABLE_KEY: document}, keys.TABLE_KEY)
        opened = read_model(store, trust)
    if opened[3][keys.TABLE_KEY] != document:
        raise _another_model(store, parse(document, Table, key=keys.TABLE_KEY))
    return opened


def _put_asset(store: Store, path: str, data: bytes) -> ObjectRef:
    digest = keys.object_digest(data)
    key = keys.asset_key(digest, path)
    ext = {ASSET_PATH: path} if "/" in path else {}
    return ObjectRef(key=key, nbytes=len(data), blake3=digest, pin=store.put(key, data), ext=ext)


def read_asset(store: Store, ref: ObjectRef) -> bytes:
    data = bytes(store.read(ref.key, nbytes=ref.nbytes, pin=ref.pin))
    check_digest(data, ref.blake3, ref.key)
    return data


def check_recipe(url: str, there: Table, ext: Mapping[str, Any]) -> None:
    """Check that the weights of a chain are quantised as a publisher quantises them."""
    theirs, mine = there.ext.get(RECIPE), ext.get(RECIPE)
    if theirs == mine:
        return
    known = theirs if isinstance(theirs, dict) else {}
    same = (
        f"quantization={known.get('recipe')!r} and {known.get('library')}=={known.get('version')}"
    )
    raise errors.ChainMismatchError(
        f"{url} holds a chain of {_quantised(theirs)}, this publisher has {_quantised(mine)}",
        hint=f"continue it with {same if known else 'no quantization'}, or use another URL",
    )


def _quantised(recipe: object) -> str:
    if not isinstance(recipe, dict):
        return "weights that are not quantised by a recipe"
    library = f"{recipe.get('library')} {recipe.get('version')}"
    return f"weights quantised by recipe {recipe.get('recipe')} of {library}"


def _another_model(store: Store, table: Table) -> errors.ChainMismatchError:
    there = parse(store.get(keys.TABLE_KEY), Table, key=keys.TABLE_KEY)
    check_recipe(store.url, there, table.ext)
    different = set(there.tensors) ^ set(table.tensors)
    example = min(different, default=("aliases", "", ()))
    return errors.ChainMismatchError(
        f"{store.url} holds a chain of another model: {len(there.tensors)} tensors, "
        f"this one has {len(table.tensors)}; for example {example}",
        hint=OTHER_LAYERS if there.ext.get(RECIPE) else "",
    )
