"""JSON documents of a chain: parsed strictly, written canonically (FORMAT.md 2).

``requires`` names features that a reader must support; ``ext`` holds data that it may ignore. Any
other unknown field is an error, so that a later format is never misread.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec

from deltachain.errors import (
    ConfigError,
    DigestMismatchError,
    MalformedError,
    UnsupportedFormatError,
)
from deltachain.format.digest import object_digest
from deltachain.format.json_guards import check_values, decode, no_repeats
from deltachain.types import StateDigest, TensorSpec, Version

FORMAT: Final = 1
"""Format number that this version writes and reads."""
FEATURES: Final[frozenset[str]] = frozenset()
"""Features that a document may require."""

EdgeKind = Literal["delta", "anchor", "skip", "base"]

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Parsed version, count or length."""

Shape: TypeAlias = Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]
"""Parsed dimensions, at most 64, so that their product is cheap to compute."""

_NAME: Final = "[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}"
Key: TypeAlias = Annotated[str, msgspec.Meta(pattern=rf"\A({_NAME}(/{_NAME})*)?\Z", max_length=512)]
"""Parsed key that is valid in every store; empty for none."""


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all documents and their parts: strict and immutable."""


class ObjectRef(Struct, frozen=True, kw_only=True):
    """Reference to an immutable object by key, size and digest.

    Attributes:
        key: Key in the store.
        nbytes: Its length in bytes.
        blake3: Its digest.
        directory: Digest of a part's directory, as stated in the part; empty for other objects.
        pin: The store's name of this content, ``xet_hash`` in JSON; empty where it has none.
        ext: Extension data, ignored by readers.
    """

    key: Key
    nbytes: Count
    blake3: str
    directory: str = ""
    pin: str = msgspec.field(default="", name="xet_hash")
    ext: dict[str, Any] = {}


class FileRef(Struct, frozen=True, kw_only=True):
    """A file of a base checkpoint, which lies outside the chain."""

    name: str
    nbytes: Count
    blake3: str


class BaseRef(Struct, frozen=True, kw_only=True):
    """Reference to a checkpoint outside the chain: a repository at a commit, or a folder.

    Attributes:
        repo: Hugging Face repository, or empty.
        revision: Its commit, or empty.
        path: Folder on the publisher's machine; a follower may keep it elsewhere.
        files: The safetensors files with their digests.
    """

    repo: str = ""
    revision: str = ""
    path: str = ""
    files: tuple[FileRef, ...] = ()


class Edge(Struct, frozen=True, kw_only=True):
    """A step that reaches a version: its base and its payload.

    Attributes:
        kind: ``anchor`` and ``base`` start from nothing; ``delta`` from the previous version;
            ``skip`` from an older one.
        base: The version it starts from.
        encodings: Encodings used in its parts; an unknown one makes only this edge unusable.
        parts: Payload objects; empty if no element changed.
        reference: The checkpoint of a ``base`` edge, else ``None``.
        ext: Extension data, ignored by readers.
    """

    kind: EdgeKind
    base: Count | None = None
    encodings: tuple[str, ...] = ()
    parts: tuple[ObjectRef, ...] = ()
    reference: BaseRef | None = None
    ext: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if (self.reference is not None) != (self.kind == "base"):
            raise ValueError(f"{self.kind} edge: only a base edge has a reference, and it must")
        if self.reference is not None and self.parts:
            raise ValueError("a base edge cannot have parts")
        if list(self.encodings) != sorted(set(self.encodings)):
            raise ValueError(f"{self.kind} edge: encodings must be sorted and unique")
        if len({part.key for part in self.parts}) < len(self.parts):
            raise ValueError(f"{self.kind} edge: duplicate part")

    @property
    def nbytes(self) -> int:
        """Size of all parts, in bytes."""
        return sum(part.nbytes for part in self.parts)


class EdgeSummary(Struct, frozen=True, kw_only=True):
    """Summary of an edge in the list of recent edges, sufficient for planning.

    Attributes:
        version: The version it reaches.
        kind: As in :class:`Edge`.
        base: As in :class:`Edge`.
        nbytes: Size of all parts, in bytes.
        parts: Number of parts.
        encodings: As in :class:`Edge`.
        record: Key of its edge record; empty for a manifest's own edge.
        digest: blake3 of that record; empty for a manifest's own edge.
        state: State digest of the version it reaches.
    """

    version: Count
    kind: EdgeKind
    base: Count | None
    nbytes: Count
    parts: Count
    encodings: tuple[str, ...]
    state: str
    record: Key = ""
    digest: str = ""

    def __post_init__(self) -> None:
        _check_way(self.version, self.kind, self.base)


class Document(Struct, frozen=True, kw_only=True):
    """Common fields of all versioned documents."""

    format: int = FORMAT
    requires: tuple[str, ...] = ()
    ext: dict[str, Any] = {}


class Manifest(Document, frozen=True, kw_only=True):
    """The commit of one version.

    Attributes:
        chain: Id of the chain.
        version: Its number.
        epoch: Incremented when another publisher takes over the chain.
        commit_id: Random id that identifies a publisher's own commit after a lost reply.
        parent: blake3 of the exact bytes of the previous manifest; empty for version 0.
        step: Optimizer step of the trainer.
        time: Seconds since 1970 on the publisher's clock; informational only.
        base_state: State digest of the previous version; empty for version 0.
        state: State digest of this version.
        nnz: Number of changed elements.
        numel: Number of all elements.
        edge: The edge that was committed with this version.
        recent: Edges of earlier versions, oldest first: every edge back to ``window_from``, and
            at least the newest edge that starts from nothing.
        window_from: The oldest version whose edges are listed completely.
        metadata: Free text of the user, by name.
    """

    chain: str
    version: Count
    epoch: Count
    commit_id: str
    parent: str
    step: int | None
    time: float
    base_state: str
    state: str
    nnz: Count
    numel: Count
    edge: Edge
    recent: tuple[EdgeSummary, ...] = ()
    window_from: Count = 0
    metadata: dict[str, str] = {}

    def __post_init__(self) -> None:
        _check_way(self.version, self.edge.kind, self.edge.base)
        if self.window_from > max(0, self.version - 1):
            raise ValueError(f"version {self.version}: window_from {self.window_from} is too late")
        if any(edge.version >= self.version for edge in self.recent):
            raise ValueError(f"version {self.version}: a recent edge leads to a later version")
        if [e.version for e in self.recent] != sorted(e.version for e in self.recent):
            raise ValueError(f"version {self.version}: recent edges are not sorted by version")

    @property
    def density(self) -> float:
        """Changed over all elements, in [0, 1]."""
        return self.nnz / self.numel if self.numel else 0.0

    def summary(self) -> EdgeSummary:
        """Summarise the manifest's own edge, as listed in later manifests."""
        return summarise(self.version, self.edge, self.state)


class EdgeRecord(Document, frozen=True, kw_only=True):
    """An edge that was added after the commit of its version."""

    chain: str
    version: Count
    manifest: str
    base_state: str
    state: str
    edge: Edge

    def __post_init__(self) -> None:
        _check_way(self.version, self.edge.kind, self.edge.base)


class Head(Document, frozen=True, kw_only=True):
    """A hint: an existing version and known anchors; may be out of date."""

    version: Count
    anchors: tuple[EdgeSummary, ...] = ()


class Table(Document, frozen=True, kw_only=True):
    """Every tensor of the model, in the order of the chain.

    Attributes:
        tensors: ``(name, wire dtype, shape)``.
        aliases: Published name by further name, for tied weights.
    """

    tensors: tuple[tuple[str, str, Shape], ...]
    aliases: dict[str, str] = {}

    def specs(self) -> tuple[TensorSpec, ...]:
        """Validate the table and return its tensors.

        Raises:
            ConfigError: A dtype, a shape or an alias is invalid, or a name occurs twice.
        """
        specs = tuple(TensorSpec(*row) for row in self.tensors)
        names = {spec.name for spec in specs}
        if len(names) < len(specs):
            raise ConfigError(f"{len(specs)} tensors have {len(names)} distinct names")
        for alias, name in self.aliases.items():
            if alias in names or name not in names:
                raise ConfigError(
                    f"alias {alias!r} -> {name!r}: the target must be in the table, "
                    "the alias must not"
                )
        return specs


class Identity(Document, frozen=True, kw_only=True):
    """Identity of a chain: its id, the digest of its tensor table, and its assets."""

    chain: str
    created: float
    table: str
    assets: tuple[ObjectRef, ...] = ()


class Signature(Struct, frozen=True, kw_only=True):
    """Signature of the exact payload bytes of an envelope."""

    key_id: str
    algorithm: str
    value: str


class Envelope(Struct, frozen=True, kw_only=True):
    """Exact payload bytes with their digest and signatures."""

    blake3: str
    payload: msgspec.Raw
    signatures: tuple[Signature, ...] = ()


def _check_way(version: Version, kind: str, base: Version | None) -> None:
    """Raise unless an edge leads forward and its base fits its kind."""
    if kind in ("anchor", "base"):
        fits = base is None
    else:
        fits = base is not None and (base == version - 1 if kind == "delta" else base < version - 1)
    if not fits:
        raise ValueError(f"a {kind} edge cannot lead from version {base} to {version}")


def summarise(
    version: Version, edge: Edge, state: str, *, record: str = "", digest: str = ""
) -> EdgeSummary:
    """Summarise an edge for planning."""
    return EdgeSummary(
        version=version,
        kind=edge.kind,
        base=edge.base,
        nbytes=edge.nbytes,
        parts=len(edge.parts),
        encodings=edge.encodings,
        state=state,
        record=record,
        digest=digest,
    )


_D = TypeVar("_D", bound=Document)


class _Gate(msgspec.Struct):
    """The two fields that are checked before the rest is parsed."""

    format: int
    requires: tuple[str, ...] = ()


def dump(document: Document) -> bytes:
    """Encode canonically: no white space, fields in the order of the class."""
    return msgspec.json.encode(document)


def parse(data: bytes, kind: type[_D], *, key: str) -> _D:
    """Check format and required features, then parse a document strictly.

    Raises:
        UnsupportedFormatError: The document needs a newer deltachain.
        MalformedError: The document is invalid.
    """
    check_values(data, key)
    try:
        gate = decode(data, _Gate)
        unknown = set(gate.requires) - FEATURES
        if gate.format != FORMAT or unknown:
            needs = ", ".join(sorted(unknown)) or f"format {gate.format}"
            raise UnsupportedFormatError(f"{key}: needs {needs}", key=key)
        json.loads(data, object_pairs_hook=no_repeats)
        return decode(data, kind)
    except (ValueError, RecursionError) as exc:
        raise MalformedError(f"{key}: {exc}", key=key) from exc


def seal(document: Document, signatures: tuple[Signature, ...] = ()) -> bytes:
    """Encode a document in an envelope with its digest and signatures."""
    payload = dump(document)
    digest = object_digest(payload)
    return msgspec.json.encode(
        Envelope(blake3=digest, payload=msgspec.Raw(payload), signatures=signatures)
    )


def unseal(data: bytes, kind: type[_D], *, key: str) -> _D:
    """Verify the digest of an envelope and parse its payload; see :func:`parse`.

    Raises:
        DigestMismatchError: The payload does not have the digest of the envelope.
    """
    check_values(data, key)
    try:
        envelope = decode(data, Envelope)
    except (ValueError, RecursionError) as exc:
        raise MalformedError(f"{key}: {exc}", key=key) from exc
    if msgspec.json.encode(envelope) != data:
        raise MalformedError(f"{key}: the envelope is not canonical", key=key)
    payload = bytes(envelope.payload)
    actual = object_digest(payload)
    if actual != envelope.blake3:
        raise DigestMismatchError(key, expected=envelope.blake3, actual=actual, key=key)
    return parse(payload, kind, key=key)


def read_state(text: str, *, key: str) -> StateDigest:
    """Parse the state digest in a document.

    Raises:
        MalformedError: The text is not a state digest.
    """
    try:
        return StateDigest.parse(text)
    except ValueError as exc:
        raise MalformedError(f"{key}: {exc}", key=key) from exc
