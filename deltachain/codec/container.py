"""The safetensors file format, read and written here: canonical headers out, hostile headers in.

The safetensors library writes its metadata in random order, so the same delta would have another
digest in each process; and it copies what it reads. Both matter here, and the format is small.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from deltachain.errors import MalformedError
from deltachain.format.json_guards import decode
from deltachain.types import WIRE_DTYPES, Buffer

MAX_HEADER: Final = 100_000_000
"""Bytes of header that safetensors itself accepts."""

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A count, a length or an offset, as read."""

ArrayShape: TypeAlias = Annotated[tuple[Size, ...], msgspec.Meta(max_length=64)]
"""Dimensions, as read: few enough that multiplying them takes no time."""

ReadAt: TypeAlias = Callable[[int, int], Buffer]
"""``read_at(start, length)``: exactly those bytes of an object."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One named array of the file: ``start`` and ``stop`` count from the file's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """The parsed header of a safetensors file.

    Attributes:
        metadata: The ``__metadata__`` strings.
        entries: In file order; together they cover every byte after the header exactly once.
        nbytes: Bytes before the first entry.
    """

    metadata: Mapping[str, str]
    entries: Mapping[str, Entry]
    nbytes: int

    @property
    def file_nbytes(self) -> int:
        """Length of the whole file."""
        return max((entry.stop for entry in self.entries.values()), default=self.nbytes)


class _Raw(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: ArrayShape
    data_offsets: tuple[Size, Size]


def write_header(
    metadata: Mapping[str, str], entries: Sequence[tuple[str, str, tuple[int, ...], int]]
) -> bytes:
    """Canonical header of ``(name, dtype, shape, nbytes)`` entries that follow it in this order.

    Metadata keys are sorted, entries are in file order, there is no white space but the spaces that
    fill the header up to a multiple of 8 bytes. Equal content gives equal bytes.
    """
    document: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    at = 0
    for name, dtype, shape, nbytes in entries:
        document[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + nbytes)}
        at += nbytes
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(read_at: ReadAt, nbytes: int, *, key: str = "") -> Header:
    """Parse and check the header of a safetensors file of ``nbytes`` bytes.

    Raises:
        MalformedError: It is too short, not JSON, has an unknown dtype, a hole, an overlap, a
            shape that disagrees with its bytes, or a length that disagrees with the file's.
    """
    if nbytes < 8:
        raise MalformedError(f"{key}: not a safetensors file: {nbytes} bytes", key=key)
    length = int.from_bytes(read_at(0, 8), "little")
    if length > min(MAX_HEADER, nbytes - 8):
        raise MalformedError(f"{key}: header of {length} bytes in a file of {nbytes}", key=key)
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
    """Check dtypes, sizes and that the entries tile the data without hole or overlap."""
    ordered = sorted(raw.items(), key=lambda item: item[1].data_offsets)
    entries, at = {}, 0
    for name, entry in ordered:
        start, stop = entry.data_offsets
        if start != at or stop < start:
            raise MalformedError(f"{key}: {name!r} lies at {start}:{stop}, expected {at}", key=key)
        if entry.dtype not in WIRE_DTYPES:
            raise MalformedError(f"{key}: {name!r} is {entry.dtype}{entry.shape}", key=key)
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


def reader_of(data: Buffer) -> ReadAt:
    """Return a reader of an object in memory or in a memory map; nothing is copied."""
    view = memoryview(data)
    return lambda start, length: view[start : start + length]
