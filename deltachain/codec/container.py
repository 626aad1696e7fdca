"""Reader and writer of the safetensors file format: canonical output, untrusted input.

The safetensors library is not used: it writes metadata in random order, so that the same delta
would have a different digest in each process, and it copies the data it reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from deltachain.errors import MalformedError
from deltachain.format.documents import Count, Shape
from deltachain.format.json_guards import decode
from deltachain.types import WIRE_DTYPES, Buffer

MAX_HEADER: Final = 100_000_000
"""Largest header that the safetensors library accepts, in bytes."""

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
        """Size of the array, in bytes."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """The parsed header of a safetensors file.

    Attributes:
        metadata: The ``__metadata__`` strings.
        entries: Entries in file order; they cover every byte after the header exactly once.
        nbytes: Number of bytes before the first entry.
    """

    metadata: Mapping[str, str]
    entries: Mapping[str, Entry]
    nbytes: int

    @property
    def file_nbytes(self) -> int:
        """Size of the whole file, in bytes."""
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
    """Parse and check the header of a safetensors file of ``nbytes`` bytes.

    Raises:
        MalformedError: The header is too short or not JSON, has an unknown dtype, a hole, an
            overlap, a shape that disagrees with its bytes, or a length unlike the file's.
    """
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


def reader_of(data: Buffer) -> ReadAt:
    """Return a reader of an object in memory or a memory map, without copies."""
    view = memoryview(data)
    return lambda start, length: view[start : start + length]
