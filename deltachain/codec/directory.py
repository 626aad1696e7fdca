"""Directory of a part: its tensors, its streams, and the digest of each frame.

A small JSON document at the front of the file, so that a reader can locate all other bytes after
one read; see :mod:`deltachain.codec.short_rows` for its form there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from deltachain.format.documents import Count, Shape
from deltachain.types import WIRE_DTYPES, TensorSpec

SEGMENT: Final = 1 << 20
"""Largest number of elements of a segment, the unit that a reader must decode."""

MAX_DIRECTORY: Final = 1 << 26
"""Largest inflated directory, in bytes: enough for a part of a trillion elements."""


class TensorRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One tensor of the part.

    Attributes:
        name: Hugging Face checkpoint name.
        dtype: Wire dtype, as safetensors names it.
        shape: Shape of the full tensor.
        encoding: Name of the encoding.
        bucket: Number of its bucket, a group of streams; 0 for raw and plain.
        gap: Size of a gap entry in bytes, 1 or 2; 0 without gaps. See FORMAT.md 4 for ``max``.
        nnz: Number of stored elements.
        segments: Number of this tensor's rows in the segment columns.
        digest: State digest of the new elements; for sparse encodings, minus that of the old. Rows
            may share one: see :mod:`deltachain.codec.row_digests`.
    """

    name: str
    dtype: str
    shape: Shape
    encoding: str
    bucket: Count
    gap: Count
    nnz: Count
    segments: Count
    digest: str

    @property
    def spec(self) -> TensorSpec:
        """Spec of the tensor."""
        return TensorSpec(self.name, self.dtype, self.shape)

    @property
    def itemsize(self) -> int:
        """Size of an element, in bytes."""
        return WIRE_DTYPES[self.dtype]


class SegmentColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All segments (windows of tensors) in the order of the tensor rows, one column a field.

    Attributes:
        start: Flat index of the segment's first element in its tensor.
        length: Number of elements in the segment, at most 2**20.
        nnz: Number of stored elements among them.
        gaps: Number of gap entries.
        exceptions: Number of steps with a magnitude other than 1.
        wide: Number of steps with a magnitude of 255 or more.
    """

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


def segments_of(columns: SegmentColumns) -> Iterator[Segment]:
    """Iterate over the rows of the columns, each created on demand.

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


def segments_near(segments: Sequence[Segment], low: int, high: int) -> tuple[int, int]:
    """Return the range of the segments with elements in ``[low, high)``."""
    first = bisect_right(segments, low, key=lambda s: s.start + s.length)
    last = bisect_left(segments, high, key=lambda s: s.start)
    return first, max(first, last)


def is_inside(segment: Segment, numel: int) -> bool:
    """Return whether a segment lies inside its tensor and its counts are possible."""
    if not 0 < segment.nnz <= segment.length <= SEGMENT:
        return False
    return segment.start + segment.length <= numel and segment.wide <= segment.exceptions


def columns_of(segments: list[Segment]) -> SegmentColumns:
    """Turn rows into columns."""
    fields = ("start", "length", "nnz", "gaps", "exceptions", "wide")
    return SegmentColumns(**{f: tuple(getattr(s, f) for s in segments) for f in fields})


def in_bits(stream: str) -> bool:
    """Return whether the unit of a bucket's stream is a bit instead of a byte."""
    return stream in ("sign", "exception")


def stream_name(bucket: int, stream: str) -> str:
    """Return the name of a bucket's stream in the file; no known tensor name starts with ``#``."""
    return f"#{bucket}.{stream}"
