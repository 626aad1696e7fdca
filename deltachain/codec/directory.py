"""The directory of a part: its tensors, its streams, and the digest of each frame.

It is a small JSON document, stored first in the file, so that one read of the front of an object
tells which other bytes of it are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from deltachain.codec.container import ArrayShape, Size
from deltachain.types import WIRE_DTYPES, StateDigest, TensorSpec

SEGMENT: Final = 1 << 20
"""Most elements that a segment spans: what a reader must decode to get at one element."""

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
    def itemsize(self) -> int:
        """Bytes an element."""
        return WIRE_DTYPES[self.dtype]

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
    """Everything in the file except the streams themselves."""

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
    """Iterate over the rows of the columns; each is made when it is asked for.

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
    """Turn rows into columns."""
    fields = ("start", "length", "nnz", "gaps", "exceptions", "wide")
    return SegmentColumns(**{f: tuple(getattr(s, f) for s in segments) for f in fields})


def in_bits(stream: str) -> bool:
    """Whether the unit of a bucket's stream is a bit, not a byte."""
    return stream in ("sign", "exception")


def stream_name(bucket: int, stream: str) -> str:
    """Name of a bucket's stream in the file; no known tensor name starts with ``#``."""
    return f"#{bucket}.{stream}"
