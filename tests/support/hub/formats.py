"""Parsers of the binary formats of the Xet protocol, as far as a server needs them.

A *xorb* is a sequence of chunks, each with a header of 8 bytes, with an optional footer. A *shard*
lists the chunks of each file. Content is not decompressed and hashes are not verified.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

_CHUNK_HEADER: Final = 8
_SHARD_HEADER: Final = 48
_RECORD: Final = 48
_BOOKEND: Final = b"\xff" * 32
_HAS_VERIFICATION: Final = 1 << 31
_HAS_METADATA: Final = 1 << 30

EMPTY_FILE: Final = "0" * 64
"""Hash of the empty file, which is in no shard."""


class XetFormatError(ValueError):
    pass


@dataclass(frozen=True, slots=True)
class ChunkRun:
    xorb: str
    nbytes: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class XorbIndex:
    """Bounds of the chunks of a xorb: one entry more than chunks."""

    stored: tuple[int, ...]
    unpacked: tuple[int, ...]


def hash_name(raw: bytes) -> str:
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


def parse_shard(data: bytes) -> dict[str, tuple[ChunkRun, ...]]:
    files: dict[str, tuple[ChunkRun, ...]] = {}
    position = _SHARD_HEADER
    try:
        while (name := data[position : position + 32]) != _BOOKEND:
            flags, count = struct.unpack_from("<II", data, position + 32)
            position += _RECORD
            files[hash_name(name)] = tuple(
                _segment(data, position + number * _RECORD) for number in range(count)
            )
            position += count * _RECORD * (2 if flags & _HAS_VERIFICATION else 1)
            position += _RECORD if flags & _HAS_METADATA else 0
    except struct.error as exc:
        raise XetFormatError("the shard is cut short") from exc
    return files


def index_xorb(data: bytes) -> XorbIndex:
    stored, unpacked = [0], [0]
    position = 0
    while position + _CHUNK_HEADER <= len(data) and not _is_footer(data, position):
        position += _CHUNK_HEADER + int.from_bytes(data[position + 1 : position + 4], "little")
        if position > len(data):
            raise XetFormatError("a chunk is cut short")
        header = stored[-1]
        stored.append(position)
        size = int.from_bytes(data[header + 5 : header + 8], "little")
        unpacked.append(unpacked[-1] + size)
    return XorbIndex(tuple(stored), tuple(unpacked))


def _is_footer(data: bytes, position: int) -> bool:
    return data[position] != 0 or data[position : position + 7] == b"XETBLOB"


def _segment(data: bytes, position: int) -> ChunkRun:
    _, nbytes, start, end = struct.unpack_from("<4I", data, position + 32)
    return ChunkRun(hash_name(data[position : position + 32]), nbytes, start, end)
