"""Content-addressed storage of the Xet protocol: stores xorbs and shards, serves reconstructions.

Xorbs and shards are files, synced before the request is answered. A shard is accepted if all its
xorbs exist and have the named chunks.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.support.hub.formats import (
    EMPTY_FILE,
    ChunkRun,
    XetFormatError,
    XorbIndex,
    index_xorb,
    parse_shard,
)


class RangeError(ValueError):
    pass


@dataclass(frozen=True, slots=True)
class Term:
    xorb: str
    start: int
    end: int
    nbytes: int


class Cas:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._files: dict[str, tuple[ChunkRun, ...]] = {}
        self._indexes: dict[str, XorbIndex] = {}
        for part in ("xorbs", "shards"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        for path in (folder / "shards").iterdir():
            if path.suffix == ".shard":
                self._files |= parse_shard(path.read_bytes())

    def put_xorb(self, name: str, data: bytes) -> bool:
        index = index_xorb(data)
        path = self._xorb(name)
        if path.exists():
            return False
        write_durably(path, data)
        with self._lock:
            self._indexes[name] = index
        return True

    def has_xorb(self, name: str) -> bool:
        return self._xorb(name).exists()

    def read_xorb(self, name: str, first: int, last: int) -> tuple[bytes, int]:
        with self._xorb(name).open("rb") as file:
            file.seek(first)
            return file.read(last - first + 1), os.fstat(file.fileno()).st_size

    def put_shard(self, data: bytes) -> None:
        files = parse_shard(data)
        for segment in (segment for segments in files.values() for segment in segments):
            self._check(segment)
        write_durably(self._folder / "shards" / f"{hashlib.sha256(data).hexdigest()}.shard", data)
        with self._lock:
            self._files |= files

    def size(self, file: str) -> int | None:
        if file == EMPTY_FILE:
            return 0
        with self._lock:
            segments = self._files.get(file)
        return None if segments is None else sum(segment.nbytes for segment in segments)

    def terms(self, file: str, first: int, end: int) -> tuple[list[Term], int]:
        with self._lock:
            segments = self._files[file]
        if first >= sum(segment.nbytes for segment in segments):
            raise RangeError(f"{file} ends before byte {first}")
        terms: list[Term] = []
        skip = position = 0
        for segment in segments:
            here, position = position, position + segment.nbytes
            if position <= first or here >= end:
                continue
            term, before = self._cut(segment, first - here, end - here)
            skip = skip if terms else before
            terms.append(term)
        return terms, skip

    def reconstruction(
        self, terms: list[Term], skip: int, urls: dict[str, str], version: Literal[1, 2]
    ) -> dict[str, Any]:
        fetches: dict[str, list[dict[str, Any]]] = {}
        for xorb, ranges in _merged(terms).items():
            stored = self._index(xorb).stored
            spans = [
                (
                    {"start": start, "end": end},
                    {"start": stored[start], "end": stored[end] - 1},
                )
                for start, end in ranges
            ]
            if version == 1:
                fetches[xorb] = [
                    {"range": chunks, "url": urls[xorb], "url_range": span}
                    for chunks, span in spans
                ]
            else:
                ranged = [{"chunks": chunks, "bytes": span} for chunks, span in spans]
                fetches[xorb] = [{"url": urls[xorb], "ranges": ranged}]
        return {
            "offset_into_first_range": skip,
            "terms": [
                {
                    "hash": term.xorb,
                    "unpacked_length": term.nbytes,
                    "range": {"start": term.start, "end": term.end},
                }
                for term in terms
            ],
            "fetch_info" if version == 1 else "xorbs": fetches,
        }

    def _cut(self, segment: ChunkRun, first: int, end: int) -> tuple[Term, int]:
        unpacked = self._index(segment.xorb).unpacked
        base = unpacked[segment.start]
        low, high = segment.start, segment.end
        while low + 1 < high and unpacked[low + 1] - base <= first:
            low += 1
        while high - 1 > low and unpacked[high - 1] - base >= end:
            high -= 1
        term = Term(segment.xorb, low, high, unpacked[high] - unpacked[low])
        return term, max(0, first - (unpacked[low] - base))

    def _check(self, segment: ChunkRun) -> None:
        if not self.has_xorb(segment.xorb):
            raise XetFormatError(f"unknown xorb {segment.xorb}")
        unpacked = self._index(segment.xorb).unpacked
        if not segment.start < segment.end < len(unpacked):
            raise XetFormatError(
                f"xorb {segment.xorb} has no chunks {segment.start}..{segment.end}"
            )
        if unpacked[segment.end] - unpacked[segment.start] != segment.nbytes:
            raise XetFormatError(f"chunks of {segment.xorb} do not have {segment.nbytes} bytes")

    def _index(self, xorb: str) -> XorbIndex:
        with self._lock:
            found = self._indexes.get(xorb)
        if found is None:
            found = index_xorb(self._xorb(xorb).read_bytes())
            with self._lock:
                self._indexes[xorb] = found
        return found

    def _xorb(self, name: str) -> Path:
        if len(name) != 64 or not name.isalnum():
            raise XetFormatError(f"{name!r} is not a hash")
        return self._folder / "xorbs" / name


def write_durably(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{threading.get_ident()}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _merged(terms: Iterable[Term]) -> dict[str, list[tuple[int, int]]]:
    merged: dict[str, list[tuple[int, int]]] = {}
    for term in sorted(terms, key=lambda term: (term.xorb, term.start)):
        ranges = merged.setdefault(term.xorb, [])
        if ranges and term.start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], term.end))
        else:
            ranges.append((term.start, term.end))
    return merged
