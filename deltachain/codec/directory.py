"""The directory of a part: which tensors, where their streams lie, what each frame must be.

It is a small JSON document, stored first in the file, so that one read of the front of an object
tells which other bytes of it are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from deltachain.codec.container import ArrayShape, Size
from deltachain.errors import ConfigError, MalformedError, UnsupportedFormatError
from deltachain.types import WIRE_DTYPES, StateDigest, TensorSpec

STEP, OVERWRITE, DENSE, RAW, PLAIN = "step", "overwrite", "dense", "raw", "plain"
ENCODINGS: Final = frozenset((STEP, OVERWRITE, DENSE, RAW, PLAIN))
"""Every encoding of a tensor that this version reads (FORMAT.md 4)."""

SPARSE: Final = frozenset((STEP, OVERWRITE, RAW))
UNCOMPRESSED: Final = frozenset((RAW, PLAIN))

MAX_DIRECTORY: Final = 1 << 26
"""Bytes a directory may inflate to: a part of a trillion elements fits."""


class TensorRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One tensor of the part.

    Attributes:
        name: Hugging Face checkpoint name.
        dtype: Wire dtype, as safetensors names it.
        shape: Shape of the full tensor.
        encoding: How its elements are stored.
        bucket: Number of the group of streams they are in; 0 for raw and plain.
        gap: Bytes of a gap, 1 or 2; 0 where there are no gaps.
        nnz: Elements stored.
        segments: Rows of the segment columns that are this tensor's.
        digest: State digest of the new elements, less, for sparse encodings, that of the old.
    """

    name: str
    dtype: str
    shape: ArrayShape
    encoding: str
    bucket: Size
    gap: Size
    nnz: Size
    segments: Size
    digest: str

    @property
    def spec(self) -> TensorSpec:
        """The tensor."""
        return TensorSpec(self.name, self.dtype, self.shape)

    @property
    def change(self) -> StateDigest:
        """``digest``, parsed."""
        return StateDigest.parse(self.digest)


class SegmentColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Windows of tensors, a column a field, in the order of the tensor rows.

    Attributes:
        start: Flat index in its tensor of the segment's first element.
        length: Elements the segment spans, at most 2**20.
        nnz: Elements stored of them.
        gaps: Gap entries.
        exceptions: Steps whose magnitude is not 1.
        wide: Steps whose magnitude does not fit below 255.
    """

    start: tuple[Size, ...]
    length: tuple[Size, ...]
    nnz: tuple[Size, ...]
    gaps: tuple[Size, ...]
    exceptions: tuple[Size, ...]
    wide: tuple[Size, ...]


class StreamRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One stream of the file and its frames: bytes stored, bytes inflated, blake3 as stored."""

    name: str
    stored: tuple[Size, ...]
    raw: tuple[Size, ...]
    digests: tuple[str, ...]


class Directory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything in the file but the streams themselves."""

    tensors: tuple[TensorRow, ...]
    segments: SegmentColumns
    streams: tuple[StreamRow, ...]


DECODER: Final = msgspec.json.Decoder(Directory)
"""Made at import: msgspec 0.22 crashes when two threads are the first to decode a nested struct."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One row of :class:`SegmentColumns`."""

    start: int
    length: int
    nnz: int
    gaps: int = 0
    exceptions: int = 0
    wide: int = 0


def segments_of(columns: SegmentColumns) -> Iterator[Segment]:
    """The rows of the columns, made as they are asked for.

    Raises:
        ValueError: The columns differ in length.
    """
    fields = (
        columns.start,
        columns.length,
        columns.nnz,
        columns.gaps,
        columns.exceptions,
        columns.wide,
    )
    if len({len(field) for field in fields}) > 1:
        raise ValueError("segment columns differ in length")
    return (Segment(*row) for row in zip(*fields, strict=True))


def columns_of(segments: list[Segment]) -> SegmentColumns:
    """The columns of the rows."""
    fields = ("start", "length", "nnz", "gaps", "exceptions", "wide")
    return SegmentColumns(**{f: tuple(getattr(s, f) for s in segments) for f in fields})


def stream_lengths(row: TensorRow, segments: tuple[Segment, ...]) -> dict[str, int]:
    """How far a tensor advances each stream of its bucket, in the stream's units.

    The unit is one byte, and one bit for ``sign`` and ``exception``.
    """
    nnz = sum(s.nnz for s in segments)
    width = WIRE_DTYPES[row.dtype]
    if row.encoding == DENSE:
        return {f"dense.{k}": nnz for k in range(width)}
    gaps = sum(s.gaps for s in segments)
    names = ["gap8"] if row.gap == 1 else ["gap16.0", "gap16.1"]
    lengths = dict.fromkeys(names, gaps)
    if row.encoding == OVERWRITE:
        return lengths | {f"value.{k}": nnz for k in range(width)}
    lengths |= {"sign": nnz, "exception": nnz, "magnitude": sum(s.exceptions for s in segments)}
    return lengths | {f"wide.{k}": sum(s.wide for s in segments) for k in range(width)}


def arrays_of(row: TensorRow) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of each array that a raw or plain tensor has for itself."""
    if row.encoding == PLAIN:
        yield row.name, row.dtype, row.shape
    elif row.encoding == RAW:
        yield f"{row.name}.indices", "I32" if row.spec.numel < 1 << 31 else "I64", (row.nnz,)
        yield f"{row.name}.values", row.dtype, (row.nnz,)


def in_bits(stream: str) -> bool:
    """Whether the unit of a stream is a bit; with or without its bucket."""
    return stream.rpartition(".")[2] in ("sign", "exception")


def stream_name(bucket: int, stream: str) -> str:
    """Name of a bucket's stream in the file; ``#`` starts no tensor name we know of."""
    return f"#{bucket}.{stream}"


def take_segments(row: TensorRow, segments: Iterator[Segment], key: str) -> tuple[Segment, ...]:
    """Check one tensor row, and take the next segments, as many as are its own.

    Each is checked before the next is made, so that columns of nonsense take no memory.

    Raises:
        UnsupportedFormatError: An encoding that this version does not know.
        MalformedError: Anything FORMAT.md 3 forbids.
    """
    if row.encoding not in ENCODINGS:
        raise UnsupportedFormatError(f"{key}: {row.name!r} is encoded as {row.encoding!r}", key=key)
    try:
        numel = row.spec.numel
        StateDigest.parse(row.digest)
    except ConfigError as exc:
        raise MalformedError(f"{key}: {exc}", key=key) from exc
    mine: list[Segment] = []
    if row.encoding in UNCOMPRESSED:
        fits = row.nnz == numel if row.encoding == PLAIN else row.nnz <= numel
        fits = fits and row.gap == row.bucket == row.segments == 0
    else:
        fits = row.gap in ((1, 2) if row.encoding in SPARSE else (0,))
        at = 0
        while fits and len(mine) < row.segments:
            segment = next(segments, None)
            fits = segment is not None and segment.start >= at and _fits(segment, row, numel)
            if fits and segment is not None:
                mine.append(segment)
                at = segment.start + segment.length
        fits = fits and row.nnz == sum(s.nnz for s in mine)
    if not fits:
        raise MalformedError(f"{key}: the row of {row.name!r} contradicts itself", key=key)
    return tuple(mine)


def _fits(s: Segment, row: TensorRow, numel: int) -> bool:
    """Inside the tensor, and no count beyond what the segment can hold."""
    limit = (1 << 8 * row.gap) - 1
    if not 0 < s.nnz <= s.length <= 1 << 20:
        return False
    if s.start + s.length > numel or s.wide > s.exceptions:
        return False
    if row.encoding == DENSE and (s.nnz != s.length or s.gaps or s.exceptions):
        return False
    if row.encoding in SPARSE and not s.nnz <= s.gaps <= s.nnz + s.length // limit:
        return False
    return s.exceptions <= (s.nnz if row.encoding == STEP else 0)
