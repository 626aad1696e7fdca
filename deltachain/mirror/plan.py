"""Plan of a mirror: which objects of a version are copied, in which order; pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deltachain.chain.log import Committed
from deltachain.errors import ForkedChainError, MalformedError
from deltachain.format import keys
from deltachain.format.documents import Edge, EdgeRecord, Identity, ObjectRef
from deltachain.types import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectCopy:
    """One object to copy.

    Attributes:
        key: Key in both stores.
        nbytes: Its length in bytes.
        digest: blake3 that its content must have.
        pin: The source's name of this content; empty if it has none.
        content: Its bytes, if it is a document, which was read and proven already.
        version: The version that names it; ``None`` for the identity of the chain.
        edge: The edge that it is a part of; ``None`` for others.
    """

    key: str
    nbytes: int
    digest: str = ""
    pin: str = ""
    content: bytes | None = None
    version: Version | None = None
    edge: Edge | None = None

    @property
    def is_document(self) -> bool:
        """Whether it is put only after everything before it, which it may name."""
        return self.content is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenDocument:
    """A document of the source that describes an edge.

    Attributes:
        key: Its key.
        content: Its exact bytes.
        version: The version that the edge leads to.
        edge: The edge.
    """

    key: str
    content: bytes
    version: Version
    edge: Edge


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDocuments:
    """Proven documents that are copied together.

    Attributes:
        committed: The manifest that they belong to.
        documents: The documents, in the order of dependence: edge records first, which may lead to
            earlier versions, and last the manifest, if it is copied.
    """

    committed: Committed
    documents: tuple[ProvenDocument, ...]


def identity_copies(identity: Identity, documents: Mapping[str, bytes]) -> tuple[ObjectCopy, ...]:
    """Return the copies of table and assets, and of the identity, which names both.

    Args:
        identity: Identity of the chain.
        documents: Exact bytes of identity and table, by key.
    """
    table, chain = (
        ObjectCopy(key=key, nbytes=len(documents[key]), content=documents[key])
        for key in (keys.TABLE_KEY, keys.CHAIN_KEY)
    )
    return table, *(_copy_of(ref, None) for ref in identity.assets), chain


def version_copies(found: VersionDocuments, *, first: Version) -> tuple[ObjectCopy, ...]:
    """Return the copies that documents need: the payloads that they name, then themselves.

    Args:
        found: The documents.
        first: The oldest version whose payloads are copied.
    """
    version, documents = found.committed.version, found.documents
    edges = (one.edge for one in documents if one.version >= first)
    copies = [_copy_of(ref, version, edge) for edge in edges for ref in edge.parts]
    for one in documents:
        nbytes = len(one.content)
        copies.append(ObjectCopy(key=one.key, nbytes=nbytes, content=one.content, version=version))
    return tuple(copies)


def is_payload(key: str) -> bool:
    """Return whether an object is a part of an edge."""
    return key.startswith(keys.PAYLOADS)


def check_link(found: Committed, before: Committed | None, chain: str) -> None:
    """Check that a manifest of the source continues the history that was copied.

    Args:
        found: The manifest.
        before: The manifest before it; ``None`` for version 0.
        chain: Id of the chain.

    Raises:
        ForkedChainError: It continues another history.
        MalformedError: It is of another chain, or names parts of others.
    """
    manifest, key = found.manifest, keys.manifest_key(found.version)
    if manifest.chain != chain:
        raise MalformedError(f"{key}: belongs to chain {manifest.chain}, not to {chain}", key=key)
    parent, state, epoch = ("", "", 0)
    if before is not None:
        parent, state, epoch = before.digest, before.manifest.state, before.manifest.epoch
    if manifest.parent != parent:
        raise ForkedChainError(
            f"{key}: names {manifest.parent or 'none'} as its parent, expected {parent or 'none'}",
            version=found.version,
        )
    if manifest.base_state != state:
        raise MalformedError(f"{key}: starts from another state than its parent's", key=key)
    if manifest.epoch < epoch:
        raise ForkedChainError(
            f"{key}: epoch {manifest.epoch} after epoch {epoch}", version=found.version
        )
    check_parts(manifest.edge, found.version, key)


def check_record_place(record: EdgeRecord, chain: str, key: str) -> None:
    """Check that an edge record is of the chain, and names parts of its version only.

    Raises:
        MalformedError: It does not.
    """
    if record.chain != chain:
        raise MalformedError(f"{key}: belongs to chain {record.chain}, not to {chain}", key=key)
    check_parts(record.edge, record.version, key)


def check_parts(edge: Edge, version: Version, key: str) -> None:
    """Check that an edge names payloads of its version only, since their keys will be written.

    Raises:
        MalformedError: It names another object.
    """
    for ref in edge.parts:
        if not is_payload(ref.key) or keys.version_of(ref.key) != version:
            raise MalformedError(f"{key}: names {ref.key!r} as a part", key=key)


def _copy_of(ref: ObjectRef, version: Version | None, edge: Edge | None = None) -> ObjectCopy:
    return ObjectCopy(
        key=ref.key, nbytes=ref.nbytes, digest=ref.blake3, pin=ref.pin, version=version, edge=edge
    )
