"""What a document may refer to, beyond what its types say (FORMAT.md 1 and 2)."""

from __future__ import annotations

from collections.abc import Iterable

from deltachain.errors import MalformedError
from deltachain.format import keys
from deltachain.format.documents import Edge, EdgeRecord, EdgeSummary, Identity


def check_edge(edge: Edge, found: EdgeSummary, promised: EdgeSummary, key: str) -> Edge:
    """The edge, once it is the one that a plan was made with.

    Args:
        edge: As its document gives it.
        found: Its summary.
        promised: The summary that the plan was made with, by whoever listed it.
        key: Of the document.

    Raises:
        MalformedError: The summary lied, or a part lies where no part of this version can.
    """
    for name in promised.__struct_fields__:
        if getattr(found, name) != getattr(promised, name):
            there, listed = repr(getattr(found, name)), repr(getattr(promised, name))
            raise MalformedError(
                f"{key}: has {name} {there[:80]}, is listed with {listed[:80]}", key=key
            )
    for ref in edge.parts:
        if keys.version_of(ref.key) != found.version:
            raise MalformedError(f"{key}: names {ref.key!r} as a part", key=key)
    return edge


def check_record(record: EdgeRecord, manifest: str, state: str, key: str) -> None:
    """An edge record lies where it belongs, and is about the version that is committed there.

    Args:
        record: As read.
        manifest: Digest of the version's manifest.
        state: State digest of the version.
        key: Where the record lies.

    Raises:
        MalformedError: It is about another one.
    """
    if record.state != state:
        raise MalformedError(f"{key}: leads to another state than its version", key=key)
    place = keys.edge_key(record.version, record.edge.kind, record.edge.base)
    if (place, record.manifest) != (key, manifest):
        raise MalformedError(f"{key}: is {place} of manifest {record.manifest[:80]}", key=key)


def check_encodings(edge: Edge, used: Iterable[str], key: str) -> None:
    """A part has the encodings that its edge lists: readers choose edges by them.

    Args:
        edge: The edge whose part it is.
        used: The encoding of each tensor of the part.
        key: Of the part.

    Raises:
        MalformedError: It has another one.
    """
    unlisted = sorted(set(used) - set(edge.encodings))
    if unlisted:
        listed = ", ".join(edge.encodings) or "none"
        raise MalformedError(
            f"{key}: has encoding {unlisted[0]!r}, its edge lists {listed}", key=key
        )


def check_assets(identity: Identity) -> Identity:
    """The identity, once each small file lies where its content says, under a name of its own.

    Raises:
        MalformedError: One does not.
    """
    names = set()
    for ref in identity.assets:
        name = ref.key.rsplit("/", 1)[-1]
        if ref.key != keys.asset_key(ref.blake3, name) or name in names:
            raise MalformedError(
                f"{keys.CHAIN_KEY}: names {ref.key!r} as a file", key=keys.CHAIN_KEY
            )
        names.add(name)
    return identity
