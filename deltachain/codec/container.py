"""Reader and writer of the safetensors file format: canonical output, untrusted input.

The safetensors library is not used: it writes metadata in random order, so that the same delta
would have a different digest in each process, and it copies the data it reads.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from deltachain.errors import MalformedError
from deltachain.format.documents import Count, Shape, decode
from deltachain.types import WIRE_DTYPES, Buffer, TensorSpec

SEGMENT: Final = 1 << 20
"""Largest number of elements of a segment, the unit that a reader must decode."""

MAX_DIRECTORY: Final = 1 << 26
"""Largest inflated directory, in bytes: enough for a part of a trillion elements."""


class TensorRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One tensor of the part."""

    name: str
    dtype: str
    shape: Shape
    encoding: str
    bucket: Count  # number of its bucket, a group of streams; 0 for raw and plain
    gap: Count  # size of a gap entry in bytes, 1 or 2; 0 without gaps. See FORMAT.md 4 for `max`
    nnz: Count
    segments: Count
    # State digest of the new elements; for sparse encodings, minus that of the old. Rows may share
    # one: see :mod:`deltachain.codec.rows`.
    digest: str

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.dtype, self.shape)

    @property
    def itemsize(self) -> int:
        return WIRE_DTYPES[self.dtype]


class SegmentColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All segments (windows of tensors) in the order of the tensor rows, one column a field."""

    start: tuple[Count, ...]
    length: tuple[Count, ...]
    nnz: tuple[Count, ...]
    gaps: tuple[Count, ...]
    exceptions: tuple[Count, ...]
    wide: tuple[Count, ...]


class StreamRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One stream, and stored size, inflated size and blake3 of the stored bytes of each frame."""

    name: str
    stored: tuple[Count, ...]
    raw: tuple[Count, ...]
    digests: tuple[str, ...]


class Directory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Description of all tensors, segments and streams of the file."""

    tensors: tuple[TensorRow, ...]
    segments: SegmentColumns
    streams: tuple[StreamRow, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """One row of :class:`SegmentColumns`."""

    start: int
    length: int
    nnz: int
    gaps: int = 0
    exceptions: int = 0
    wide: int = 0


def segments_near(segments: Sequence[Segment], low: int, high: int) -> tuple[int, int]:
    """Return which segments, first and behind the last, have elements in ``[low, high)``."""
    first = bisect_right(segments, low, key=lambda s: s.start + s.length)
    last = bisect_left(segments, high, key=lambda s: s.start)
    return first, max(first, last)


def columns_of(segments: list[Segment]) -> SegmentColumns:
    fields = ("start", "length", "nnz", "gaps", "exceptions", "wide")
    return SegmentColumns(**{f: tuple(getattr(s, f) for s in segments) for f in fields})


def in_bits(stream: str) -> bool:
    """Return whether the unit of a bucket's stream is a bit instead of a byte."""
    return stream in ("sign", "exception")


def stream_name(bucket: int, stream: str) -> str:
    """Return the name of a bucket's stream in the file; no known tensor name starts with ``#``."""
    return f"#{bucket}.{stream}"


MAX_HEADER: Final = 100_000_000  # largest header that the safetensors library accepts, in bytes
ReadAt: TypeAlias = Callable[[int, int], Buffer]
"""Function ``read_at(start, length)`` that returns exactly those bytes of an object."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One named array; ``start`` and ``stop`` are offsets from the file's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """The parsed header of a safetensors file.

    Attributes:
        entries: Entries in file order; they cover every byte after the header exactly once.
        nbytes: Number of bytes before the first entry.
    """

    metadata: Mapping[str, str]
    entries: Mapping[str, Entry]
    nbytes: int

    @property
    def file_nbytes(self) -> int:
        return max((entry.stop for entry in self.entries.values()), default=self.nbytes)


class _Raw(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Shape
    data_offsets: tuple[Count, Count]


def write_header(
    metadata: Mapping[str, str], entries: Sequence[tuple[str, str, tuple[int, ...], int]]
) -> bytes:
    """Return the canonical header of ``(name, dtype, shape, nbytes)`` entries in file order.

    Metadata keys are sorted, entries are in file order, and the only white space is padding of the
    header to a multiple of 8 bytes. Equal content gives equal bytes.
    """
    document: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    at = 0
    for name, dtype, shape, nbytes in entries:
        document[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + nbytes)}
        at += nbytes
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


_OTHER_DTYPE: Final = (
    f"tensors of a chain are {', '.join(WIRE_DTYPES)}: save the checkpoint without others; if "
    "it is an object of a store, it is damaged and was not used: put it back from a backup"
)

_NOT_SAFETENSORS: Final = (
    "name a safetensors file; if it is an object of a store, it is damaged and was not used: put "
    "it back from a backup"
)


def read_header(read_at: ReadAt, nbytes: int, *, key: str = "") -> Header:
    """Parse and check the header of a safetensors file of ``nbytes`` bytes."""
    if nbytes < 8:
        raise MalformedError(
            f"{key}: not a safetensors file: {nbytes} bytes", key=key, hint=_NOT_SAFETENSORS
        )
    length = int.from_bytes(read_at(0, 8), "little")
    if length > min(MAX_HEADER, nbytes - 8):
        raise MalformedError(
            f"{key}: not a safetensors file, or cut short: its first bytes say that a header of "
            f"{length} bytes follows, and it has {nbytes}",
            key=key,
            hint=_NOT_SAFETENSORS,
        )
    try:
        fields = decode(read_at(8, length), dict[str, msgspec.Raw])
        metadata = decode(fields.pop("__metadata__", b"{}"), dict[str, str])
        raw = {name: decode(text, _Raw) for name, text in fields.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedError(f"{key}: header: {exc}", key=key) from exc
    header = Header(metadata, _entries(raw, 8 + length, key), 8 + length)
    if header.file_nbytes != nbytes:
        raise MalformedError(
            f"{key}: the header describes {header.file_nbytes} bytes, the file has {nbytes}",
            key=key,
        )
    return header


def _entries(raw: Mapping[str, _Raw], base: int, key: str) -> dict[str, Entry]:
    """Check dtypes and sizes, and that the entries cover the data without hole or overlap."""
    ordered = sorted(raw.items(), key=lambda item: item[1].data_offsets)
    entries, at = {}, 0
    for name, entry in ordered:
        start, stop = entry.data_offsets
        if start != at or stop < start:
            raise MalformedError(f"{key}: {name!r} lies at {start}:{stop}, expected {at}", key=key)
        if entry.dtype not in WIRE_DTYPES:
            raise MalformedError(
                f"{key}: {name!r} is {entry.dtype}{entry.shape}", key=key, hint=_OTHER_DTYPE
            )
        size = WIRE_DTYPES[entry.dtype]
        for dim in entry.shape:
            size *= dim
        if size != stop - start:
            raise MalformedError(
                f"{key}: {name!r} is {entry.dtype}{entry.shape} in {stop - start} bytes", key=key
            )
        entries[name] = Entry(name, entry.dtype, entry.shape, base + start, base + stop)
        at = stop
    return entries
