"""JSON documents of a chain: parsed strictly, written canonically (FORMAT.md 2).

``requires`` names features that a reader must support; ``ext`` holds data that it may ignore. Any
other unknown field is an error, so that a later format is never misread.
"""

import itertools
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec

from deltachain import errors
from deltachain.format.keys import object_digest
from deltachain.types import StateDigest, TensorSpec, Version

MAX_VALUES: Final = 3_000_000
"""Limit of values in a document: 500,000 tensors in a table, about 0.5 GB as Python objects."""

_T = TypeVar("_T")
_lock = Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decode(data: bytes | bytearray | memoryview, kind: type[_T]) -> _T:
    """Decode JSON strictly as a type.

    msgspec 0.22 crashes the process where two threads are the first to decode a nested struct; so
    decoders are made one at a time.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        with _lock:
            decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    found: _T = decoder.decode(data)
    return found


def check_values(data: bytes, key: str) -> None:
    """Limit the number of values before parsing, since objects take up to 100x their JSON bytes."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
        raise errors.MalformedError(f"{key}: has more than {MAX_VALUES} values", key=key)


def no_repeats(fields: list[tuple[str, Any]]) -> None:
    """Reject duplicate keys: JSON leaves their meaning undefined."""
    seen = set()
    for name, _ in fields:
        if name in seen:
            raise ValueError(f"duplicate field {name[:80]!r}")
        seen.add(name)


FORMAT: Final = 1  # format number that this version writes and reads
FEATURES: Final[frozenset[str]] = frozenset()  # features that a document may require
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
    """Reference to an immutable object by key, size and digest."""

    key: Key
    nbytes: Count  # its length in bytes
    blake3: str  # its digest
    # Digest of a part's directory, as stated in the part; empty for other objects.
    directory: str = ""
    # The store's name of this content, `xet_hash` in JSON; empty where it has none.
    pin: str = msgspec.field(default="", name="xet_hash")
    ext: dict[str, Any] = {}


class FileRef(Struct, frozen=True, kw_only=True):
    """A file of a base checkpoint, which lies outside the chain."""

    name: str
    nbytes: Count
    blake3: str


class BaseRef(Struct, frozen=True, kw_only=True):
    """Reference to a checkpoint outside the chain: a repository at a commit, or a folder."""

    repo: str = ""
    revision: str = ""
    path: str = ""
    files: tuple[FileRef, ...] = ()


class Edge(Struct, frozen=True, kw_only=True):
    """A step that reaches a version: its base and its payload.

    Attributes:
        kind: ``anchor`` and ``base`` start from nothing; ``delta`` from the previous version;
            ``skip`` from an older one.
        encodings: Encodings used in its parts; an unknown one makes only this edge unusable.
        reference: The checkpoint of a ``base`` edge, else ``None``.
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
        return sum(part.nbytes for part in self.parts)


class EdgeSummary(Struct, frozen=True, kw_only=True):
    """Summary of an edge in the list of recent edges, sufficient for planning."""

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
    """The commit of one version."""

    chain: str
    version: Count
    epoch: Count
    commit_id: str  # random id that identifies a publisher's own commit after a lost reply
    parent: str  # blake3 of the exact bytes of the previous manifest; empty for version 0
    step: int | None
    time: float  # seconds since 1970 on the publisher's clock; informational only
    base_state: str  # state digest of the previous version; empty for version 0
    state: str
    nnz: Count
    numel: Count
    edge: Edge
    # Edges of earlier versions, oldest first: every edge back to `window_from`, and at least the
    # newest edge that starts from nothing.
    recent: tuple[EdgeSummary, ...] = ()
    window_from: Count = 0  # the oldest version whose edges are listed completely
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
    """Every tensor of the model, in the order of the chain."""

    tensors: tuple[tuple[str, str, Shape], ...]  # `(name, wire dtype, shape)`
    aliases: dict[str, str] = {}

    def specs(self) -> tuple[TensorSpec, ...]:
        """Validate the table and return its tensors."""
        specs = tuple(TensorSpec(*row) for row in self.tensors)
        names = {spec.name for spec in specs}
        if len(names) < len(specs):
            raise errors.ConfigError(f"{len(specs)} tensors have {len(names)} distinct names")
        for alias, name in self.aliases.items():
            if alias in names or name not in names:
                raise errors.ConfigError(
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
    """Check format and required features, then parse a document strictly."""
    check_values(data, key)
    try:
        gate = decode(data, _Gate)
        unknown = set(gate.requires) - FEATURES
        if gate.format != FORMAT or unknown:
            needs = ", ".join(sorted(unknown)) or f"format {gate.format}"
            raise errors.UnsupportedFormatError(f"{key}: needs {needs}", key=key)
        json.loads(data, object_pairs_hook=no_repeats)
        return decode(data, kind)
    except (ValueError, RecursionError) as exc:
        raise errors.MalformedError(f"{key}: {exc}", key=key) from exc


def seal(document: Document, signatures: tuple[Signature, ...] = ()) -> bytes:
    """Encode a document in an envelope with its digest and signatures."""
    payload = dump(document)
    digest = object_digest(payload)
    return msgspec.json.encode(
        Envelope(blake3=digest, payload=msgspec.Raw(payload), signatures=signatures)
    )


def unseal(data: bytes, kind: type[_D], *, key: str) -> _D:
    """Verify the digest of an envelope and parse its payload; see :func:`parse`."""
    check_values(data, key)
    try:
        envelope = decode(data, Envelope)
    except (ValueError, RecursionError) as exc:
        raise errors.MalformedError(f"{key}: {exc}", key=key) from exc
    if msgspec.json.encode(envelope) != data:
        raise errors.MalformedError(f"{key}: the envelope is not canonical", key=key)
    payload = bytes(envelope.payload)
    actual = object_digest(payload)
    if actual != envelope.blake3:
        raise errors.DigestMismatchError(key, expected=envelope.blake3, actual=actual, key=key)
    return parse(payload, kind, key=key)


def check_state(text: str, *, key: str) -> None:
    try:
        StateDigest.parse(text)
    except ValueError as exc:
        raise errors.MalformedError(f"{key}: {exc}", key=key) from exc


NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")  # names of tags
MAX_NUMBER: Final = 10**8 - 1  # largest number of a tag record: eight digits


class Tag(Document, frozen=True, kw_only=True):
    """One record of a tag; the record with the largest number counts."""

    chain: str
    name: str
    number: Count
    version: Count | None
    state: str
    manifest: str
    time: float

    def __post_init__(self) -> None:
        if NAME.fullmatch(self.name) is None or self.number > MAX_NUMBER:
            raise ValueError(f"tag {self.name[:80]!r}, number {self.number}: no such tag can exist")
        if (self.version is None) != (not self.state) or bool(self.state) != bool(self.manifest):
            raise ValueError(f"tag {self.name!r}: names a version without its state and manifest")


_FIELD: Final = "deltachain.reverted_to"


def revert_mark(version: Version) -> dict[str, Any]:
    """Return the ``ext`` of a manifest that goes back to a version."""
    return {_FIELD: version}


def reverted_to(manifest: Manifest) -> Version | None:
    """Return the version that a manifest goes back to; ``None`` if it has no valid mark."""
    found = manifest.ext.get(_FIELD)
    if not isinstance(found, int) or isinstance(found, bool):
        return None
    return found if 0 <= found < manifest.version else None


NAMES: Final = ("diff", "encode", "upload")

LONGEST_S: Final = 1e9  # largest time that is believed, in seconds
_PHASES: Final = "deltachain.phases"


def phases_mark(seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return the ``ext`` of a manifest that tells how long each phase took, to a millisecond."""
    return {_PHASES: {name: round(seconds[name], 3) for name in NAMES if name in seconds}}


def phases_of(manifest: Manifest) -> dict[str, float]:
    """Return the seconds of each phase before the commit; without those that are invalid."""
    found = manifest.ext.get(_PHASES)
    return valid_times(found, NAMES) if isinstance(found, dict) else {}


def valid_times(given: Mapping[str, object], names: Iterable[str]) -> dict[str, float]:
    found = {name: given.get(name) for name in names}
    return {name: float(value) for name, value in found.items() if _is_time(value)}  # type: ignore[arg-type]


def _is_time(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and 0 <= value <= LONGEST_S  # type: ignore[arg-type,operator]


PrunedKind = Literal["delta", "anchor", "skip"]


class PrunedRange(Struct, frozen=True, kw_only=True):
    """Pruned edges of one kind and span, to a range of versions."""

    kind: PrunedKind
    span: Count  # versions from their base to the version that they lead to; 0 for anchors
    first: Count
    last: Count  # the last one, included
    # Earliest time of deletion of their objects, in seconds since 1970 by the clock of the store.
    after: float

    def __post_init__(self) -> None:
        fits = {"delta": self.span == 1, "anchor": self.span == 0, "skip": self.span > 1}
        if not fits[self.kind]:
            raise ValueError(f"a pruned {self.kind} cannot have span {self.span}")
        if self.first > self.last:
            raise ValueError(f"a range of versions from {self.first} to {self.last}")

    def covers(self, kind: str, base: Version | None, version: Version) -> bool:
        span = 0 if base is None else version - base
        return (kind, span) == (self.kind, self.span) and self.first <= version <= self.last


class PruneRecord(Document, frozen=True, kw_only=True):
    """All edges pruned so far: a later record replaces an earlier one."""

    chain: str
    number: Count
    head: Count
    maintainer: str
    time: float
    pruned: tuple[PrunedRange, ...] = ()

    def __post_init__(self) -> None:
        if any(row.last > self.head for row in self.pruned):
            raise ValueError(f"prune record {self.number}: prunes versions after {self.head}")
        rows = [(row.kind, row.span, row.first, row.last) for row in self.pruned]
        for one, other in itertools.pairwise(rows):
            if one[:2] > other[:2] or (one[:2] == other[:2] and one[3] >= other[2]):
                raise ValueError(f"prune record {self.number}: ranges are not sorted")

    def range_of(self, kind: str, base: Version | None, version: Version) -> PrunedRange | None:
        """Return the range that an edge is in, in O(log n); ``None`` if it is not pruned."""
        place = kind, 0 if base is None else version - base, version
        number = bisect_right(self.pruned, place, key=lambda row: (row.kind, row.span, row.first))
        row = self.pruned[number - 1] if number else None
        return row if row is not None and row.covers(kind, base, version) else None

    def covers(self, edge: EdgeSummary) -> bool:
        return self.range_of(edge.kind, edge.base, edge.version) is not None

    def closes(self, version: Version) -> bool:
        """Return whether nothing may be added to a version, because the delta to it is pruned.

        Parts of a skip or an anchor that come late would be taken for orphans.
        """
        return self.range_of("delta", version - 1, version) is not None


class Heartbeat(Document, frozen=True, kw_only=True):
    """A publisher's word that a version, and tag and prune records, are the newest at a time."""

    chain: str
    version: Count
    manifest: str  # blake3 of the exact bytes of its manifest
    time: float  # seconds since 1970 on the publisher's clock
    # Number of the newest record of each tag, of removed ones too, by name; `None` if nothing is
    # said of tags.
    tags: dict[str, Count] | None = None
    prunes: Count = 0


RECORD_TYPES: Final[Mapping[type[Document], str]] = {
    Identity: "chain",
    Manifest: "manifest",
    EdgeRecord: "edge",
    PruneRecord: "prune",
    Tag: "tag",
    Heartbeat: "heartbeat",
}
"""Record type of each document that can be signed; it is part of the signed bytes."""

CONTEXT: Final = b"deltachain signature"
"""First of the signed bytes, so that no signature of another program counts here."""


CHAIN_ID: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
"""Id of a chain that can be part of a key."""


class IdentitySignature(Document, frozen=True, kw_only=True):
    """Signature of the exact bytes of ``chain.json``, in an object of its own."""

    chain: str
    signature: Signature


def signed_bytes(kind: type[Document], chain: str, payload: bytes) -> bytes:
    """Return the bytes that a signature covers: context, record type, chain and payload."""
    if CHAIN_ID.fullmatch(chain) is None:
        raise ValueError("its id cannot be part of a key")
    fields = (CONTEXT, RECORD_TYPES[kind].encode(), chain.encode(), payload)
    return b"\0".join(fields)


def opened(envelope: bytes) -> tuple[bytes, tuple[Signature, ...]]:
    """Return payload and signatures of an envelope that :func:`documents.unseal` accepted."""
    found = msgspec.json.decode(envelope, type=Envelope)
    return bytes(found.payload), found.signatures
