"""The JSON documents of a chain: strict in, canonical out (FORMAT.md 2).

``requires`` names features that a reader must know; ``ext`` holds what it may ignore. Everything
else is strict: a field this version does not know is an error, so that a later format can never be
half understood.
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
from deltachain.format.json_guards import check_values, no_repeats
from deltachain.types import StateDigest, TensorSpec, Version

FORMAT: Final = 1
"""Number of the formats that this version writes and reads."""
FEATURES: Final[frozenset[str]] = frozenset()
"""What a document may require of us."""

EdgeKind = Literal["delta", "anchor", "skip", "base"]

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A version, a number or a length, as read."""

Shape: TypeAlias = Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]
"""Dimensions, as read: few enough that multiplying them takes no time."""

_NAME: Final = "[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}"
Key: TypeAlias = Annotated[str, msgspec.Meta(pattern=rf"\A({_NAME}(/{_NAME})*)?\Z", max_length=512)]
"""A key that every store can hold, as read; empty for none."""


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A strict, immutable document or a piece of one."""


class ObjectRef(Struct, frozen=True, kw_only=True):
    """An immutable object: where it lies and what it must be.

    Attributes:
        key: Key in the store.
        nbytes: Its length.
        blake3: Its digest.
        directory: Digest of a part's front, as the part itself states it; empty for other objects.
        xet_hash: How a Hugging Face bucket pins the content; empty elsewhere.
        ext: What a reader may ignore.
    """

    key: Key
    nbytes: Count
    blake3: str
    directory: str = ""
    xet_hash: str = ""
    ext: dict[str, Any] = {}


class FileRef(Struct, frozen=True, kw_only=True):
    """One file of a checkpoint that the chain does not hold itself."""

    name: str
    nbytes: Count
    blake3: str


class BaseRef(Struct, frozen=True, kw_only=True):
    """A checkpoint that is to be had elsewhere: a repository at a commit, or a folder.

    Attributes:
        repo: Hugging Face repository, or empty.
        revision: Its commit, or empty.
        path: Folder where the publisher read it; a follower may hold it anywhere.
        files: The safetensors files, by content.
    """

    repo: str = ""
    revision: str = ""
    path: str = ""
    files: tuple[FileRef, ...] = ()


class Edge(Struct, frozen=True, kw_only=True):
    """One way to reach a version.

    Attributes:
        kind: ``anchor`` and ``base`` start from nothing; ``delta`` from the version before;
            ``skip`` from an older one.
        base: The version it starts from.
        encodings: Every encoding in its parts: one that is unknown disables the edge alone.
        parts: Its payload objects. None: nothing changed.
        reference: The checkpoint of a ``base`` edge.
        ext: What a reader may ignore.
    """

    kind: EdgeKind
    base: Count | None = None
    encodings: tuple[str, ...] = ()
    parts: tuple[ObjectRef, ...] = ()
    reference: BaseRef | None = None
    ext: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if (self.reference is not None) != (self.kind == "base"):
            raise ValueError(f"{self.kind} edge: a base edge has a reference, no other has")
        if self.reference is not None and self.parts:
            raise ValueError("a base edge has no parts")
        if list(self.encodings) != sorted(set(self.encodings)):
            raise ValueError(f"{self.kind} edge: encodings are sorted, each is there once")
        if len({part.key for part in self.parts}) < len(self.parts):
            raise ValueError(f"{self.kind} edge: a part is there twice")

    @property
    def nbytes(self) -> int:
        """Bytes of all its parts."""
        return sum(part.nbytes for part in self.parts)


class EdgeSummary(Struct, frozen=True, kw_only=True):
    """An edge as the window of recent edges lists it, enough to plan with.

    Attributes:
        version: The version it reaches.
        kind: As in :class:`Edge`.
        base: As in :class:`Edge`.
        nbytes: Bytes of all its parts.
        parts: Number of its parts.
        encodings: As in :class:`Edge`.
        record: Key of the edge record that holds it, or empty when it is the manifest's own.
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
    """What every versioned document begins with."""

    format: int = FORMAT
    requires: tuple[str, ...] = ()
    ext: dict[str, Any] = {}


class Manifest(Document, frozen=True, kw_only=True):
    """The commit of one version.

    Attributes:
        chain: Id of the chain.
        version: Its number.
        epoch: Grows by one whenever another publisher takes the chain over.
        commit_id: Random; tells our own commit from another's after a lost reply.
        parent: blake3 of the exact bytes of the manifest before; empty for version 0.
        step: Optimizer step, as the trainer counts.
        time: Seconds since 1970, by the publisher's clock; never decided by.
        base_state: State digest of the version before; empty for version 0.
        state: State digest of this version.
        nnz: Elements changed.
        numel: Elements in all.
        edge: The way to this version that was committed with it.
        recent: Edges of the versions before this one, oldest first; at least the newest edge that
            starts from nothing, and every edge back to ``window_from``.
        window_from: The oldest version whose edges are all listed.
        metadata: The user's own words.
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
            raise ValueError(f"version {self.version}: its window begins at {self.window_from}")
        if any(edge.version >= self.version for edge in self.recent):
            raise ValueError(f"version {self.version}: a recent edge is no earlier one")
        if [e.version for e in self.recent] != sorted(e.version for e in self.recent):
            raise ValueError(f"version {self.version}: recent edges are not in order")

    @property
    def density(self) -> float:
        """Changed share of all elements."""
        return self.nnz / self.numel if self.numel else 0.0

    def summary(self) -> EdgeSummary:
        """The manifest's own edge, as later manifests list it."""
        return summarise(self.version, self.edge, self.state)


class EdgeRecord(Document, frozen=True, kw_only=True):
    """A way to a version that was added after its commit."""

    chain: str
    version: Count
    manifest: str
    base_state: str
    state: str
    edge: Edge

    def __post_init__(self) -> None:
        _check_way(self.version, self.edge.kind, self.edge.base)


class Head(Document, frozen=True, kw_only=True):
    """A hint: a version that exists, and records of anchors. Never the truth."""

    version: Count
    anchors: tuple[EdgeSummary, ...] = ()


class Table(Document, frozen=True, kw_only=True):
    """Every tensor of the model, in the order of the chain.

    Attributes:
        tensors: ``(name, wire dtype, shape)``.
        aliases: Names that tied weights also have, and the name they are published under.
    """

    tensors: tuple[tuple[str, str, Shape], ...]
    aliases: dict[str, str] = {}

    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors, checked.

        Raises:
            ConfigError: A dtype or a shape is none, a name is there twice, or an alias of nothing.
        """
        specs = tuple(TensorSpec(*row) for row in self.tensors)
        names = {spec.name for spec in specs}
        if len(names) < len(specs):
            raise ConfigError(f"{len(specs)} tensors have {len(names)} names")
        for alias, name in self.aliases.items():
            if alias in names or name not in names:
                raise ConfigError(
                    f"alias {alias!r} -> {name!r}: the target must be in the table, "
                    "the alias must not"
                )
        return specs


class Identity(Document, frozen=True, kw_only=True):
    """What a chain is: its id, its tensor table by digest, small files of the checkpoint."""

    chain: str
    created: float
    table: str
    assets: tuple[ObjectRef, ...] = ()


class Signature(Struct, frozen=True, kw_only=True):
    """A signature over the exact payload bytes of an envelope."""

    key_id: str
    algorithm: str
    value: str


class Envelope(Struct, frozen=True, kw_only=True):
    """Payload, kept byte for byte, its digest, and signatures over it."""

    blake3: str
    payload: msgspec.Raw
    signatures: tuple[Signature, ...] = ()


def _check_way(version: Version, kind: str, base: Version | None) -> None:
    """An edge leads forward, from where its kind says."""
    if kind in ("anchor", "base"):
        fits = base is None
    else:
        fits = base is not None and (base == version - 1 if kind == "delta" else base < version - 1)
    if not fits:
        raise ValueError(f"no {kind} leads from version {base} to {version}")


def summarise(
    version: Version, edge: Edge, state: str, *, record: str = "", digest: str = ""
) -> EdgeSummary:
    """What a planner needs to know of an edge."""
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
    """The two fields that are read before anything else is."""

    format: int
    requires: tuple[str, ...] = ()


def dump(document: Document) -> bytes:
    """Canonical bytes: no white space, fields in the order of the class."""
    return msgspec.json.encode(document)


def parse(data: bytes, kind: type[_D], *, key: str) -> _D:
    """Read a document strictly, once its format and requirements are known to be ours.

    Raises:
        UnsupportedFormatError: It needs a newer deltachain.
        MalformedError: It is no such document.
    """
    check_values(data, key)
    try:
        gate = msgspec.json.decode(data, type=_Gate)
        unknown = set(gate.requires) - FEATURES
        if gate.format != FORMAT or unknown:
            needs = ", ".join(sorted(unknown)) or f"format {gate.format}"
            raise UnsupportedFormatError(f"{key}: needs {needs}", key=key)
        json.loads(data, object_pairs_hook=no_repeats)
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as exc:
        raise MalformedError(f"{key}: {exc}", key=key) from exc


def seal(document: Document) -> bytes:
    """Put a document into an envelope."""
    payload = dump(document)
    return msgspec.json.encode(
        Envelope(blake3=object_digest(payload), payload=msgspec.Raw(payload))
    )


def unseal(data: bytes, kind: type[_D], *, key: str) -> _D:
    """Take a document out of its envelope, prove it, and read it as :func:`parse` does.

    Raises:
        DigestMismatchError: The payload is not the one that was sealed.
    """
    check_values(data, key)
    try:
        envelope = msgspec.json.decode(data, type=Envelope)
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
    """Parse a state digest that a document carries.

    Raises:
        MalformedError: It is none.
    """
    try:
        return StateDigest.parse(text)
    except ValueError as exc:
        raise MalformedError(f"{key}: {exc}", key=key) from exc
