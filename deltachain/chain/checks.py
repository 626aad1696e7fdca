"""Reading documents of a chain, and the checks beyond their types (FORMAT.md 1 and 2)."""

import re
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from deltachain import errors
from deltachain.chain.trust import Trust
from deltachain.format import documents, keys
from deltachain.format.keys import edge_key, object_digest
from deltachain.store import Store
from deltachain.store.base import MAX_DOCUMENT
from deltachain.types import Buffer

_T = TypeVar("_T")
_D = TypeVar("_D", bound=documents.Document)


def once_more(read: Callable[[], _T]) -> _T:
    """Call a function that reads objects; again if one is damaged: a bit may flip in transit."""
    try:
        return read()
    except errors.FormatError:
        return read()


def read_document(  # noqa: PLR0913 - where it is, and what proves it
    store: Store,
    key: str,
    kind: type[_D],
    *,
    chain: str,
    trust: Trust,
    digest: str = "",
    limit: int = MAX_DOCUMENT,
) -> tuple[_D, bytes]:
    """Read a sealed document of a chain, once more if it is damaged."""

    def read() -> tuple[_D, bytes]:
        data = store.get(key, limit=limit)
        if digest:
            check_digest(data, digest, key)
        document = documents.unseal(data, kind, key=key)
        if not digest:
            trust.check(data, kind, chain=chain, key=key)
        found = getattr(document, "chain", chain)
        if found != chain:
            raise errors.MalformedError(
                f"{key}: belongs to chain {found[:80]}, not to {chain}", key=key
            )
        return document, data

    return once_more(read)


def check_digest(data: Buffer, expected: str, key: str) -> None:
    actual = object_digest(data)
    if actual != expected:
        raise errors.DigestMismatchError(key, expected=expected, actual=actual, key=key)


def read_summary(
    store: Store, key: str, *, chain: str, trust: Trust
) -> documents.EdgeSummary | None:
    """Read an edge record and summarise its edge."""
    try:
        record, data = read_document(store, key, documents.EdgeRecord, chain=chain, trust=trust)
    except (errors.ObjectNotFoundError, errors.FormatError):
        return None
    edge = record.edge
    if edge_key(record.version, edge.kind, edge.base) != key:
        return None
    return documents.summarise(
        record.version, edge, record.state, record=key, digest=object_digest(data)
    )


ASSET_PATH: Final = "path"
"""Entry of an asset reference's ``ext``: path of a file that lies in a folder."""

_PATH: Final = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]*/)?[A-Za-z0-9_-][A-Za-z0-9._-]*")


def check_edge(
    edge: documents.Edge, found: documents.EdgeSummary, promised: documents.EdgeSummary, key: str
) -> documents.Edge:
    """Check an edge against the summary in a plan, and return it."""
    for name in promised.__struct_fields__:
        if getattr(found, name) != getattr(promised, name):
            there, listed = repr(getattr(found, name)), repr(getattr(promised, name))
            raise errors.MalformedError(
                f"{key}: has {name} {there[:80]}, is listed with {listed[:80]}", key=key
            )
    for ref in edge.parts:
        if keys.version_of(ref.key) != found.version:
            raise errors.MalformedError(f"{key}: names {ref.key!r} as a part", key=key)
    return edge


def check_record(record: documents.EdgeRecord, manifest: str, state: str, key: str) -> None:
    """Check that an edge record fits its key and the committed version."""
    if record.state != state:
        raise errors.MalformedError(f"{key}: leads to another state than its version", key=key)
    place = keys.edge_key(record.version, record.edge.kind, record.edge.base)
    if (place, record.manifest) != (key, manifest):
        raise errors.MalformedError(
            f"{key}: is {place} of manifest {record.manifest[:80]}", key=key
        )


def check_encodings(edge: documents.Edge, used: Iterable[str], key: str) -> None:
    """Check that a part has only encodings that its edge lists, by which readers choose edges."""
    unlisted = sorted(set(used) - set(edge.encodings))
    if unlisted:
        listed = ", ".join(edge.encodings) or "none"
        raise errors.MalformedError(
            f"{key}: has encoding {unlisted[0]!r}, its edge lists {listed}", key=key
        )


def check_assets(identity: documents.Identity) -> documents.Identity:
    """Check key and name of each asset of an identity, and return the identity."""
    names = set()
    for ref in identity.assets:
        name = ref.key.rsplit("/", 1)[-1]
        if ref.key != keys.asset_key(ref.blake3, asset_path(ref)) or name in names:
            raise errors.MalformedError(
                f"{keys.CHAIN_KEY}: names {ref.key!r} as a file", key=keys.CHAIN_KEY
            )
        names.add(name)
    return identity


def asset_path(ref: documents.ObjectRef) -> str:
    """Return the path of an asset in a checkpoint folder: a name, or a folder's and a name."""
    path = ref.ext.get(ASSET_PATH, ref.key.rsplit("/", 1)[-1])
    if not isinstance(path, str) or _PATH.fullmatch(path) is None:
        raise errors.MalformedError(
            f"{keys.CHAIN_KEY}: names {path!r} as a path", key=keys.CHAIN_KEY
        )
    return path


def asset_paths(identity: documents.Identity) -> frozenset[str]:
    return frozenset(map(asset_path, identity.assets))


def check_paths(paths: Iterable[str]) -> None:
    """Check the paths of assets that a writer was given."""
    keyed: dict[str, str] = {}
    for path in paths:
        other = keyed.setdefault(keys.asset_key("", path), path)
        if _PATH.fullmatch(path) is None or other != path:
            raise errors.ConfigError(
                f"{path!r} cannot be an asset" + (f" beside {other!r}" if other != path else ""),
                hint="an asset is config.json or 1_Pooling/config.json, for example: letters, "
                "digits and . _ - in at most one folder",
            )
