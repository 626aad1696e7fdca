"""State of an emulated Hub, in one folder."""

import hashlib
import hmac
import json
import os
import secrets
import sqlite3
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

WRITE_TOKEN: Final = "hf_emulated_write"  # noqa: S105
READ_TOKEN: Final = "hf_emulated_read"  # noqa: S105
S3_KEY: Final = "HFAKEMULATED"
S3_SECRET: Final = "emulated"  # noqa: S105

_FILE: Final = "settings.json"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a Hub; the default limits are those of a free account."""

    tokens: dict[str, str] = field(
        default_factory=lambda: {WRITE_TOKEN: "write", READ_TOKEN: "read"}
    )
    s3_keys: list[str] = field(default_factory=lambda: [S3_KEY])
    calls: int = 1000
    window_s: float = 300.0
    page: int = 1000
    xet_token_s: float = 3600.0

    @classmethod
    def load(cls, folder: Path) -> "Settings":
        try:
            saved = (folder / _FILE).read_text(encoding="utf-8")
        except FileNotFoundError:
            return cls()
        return cls(**json.loads(saved))

    def changed(self, changes: dict[str, Any]) -> "Settings":
        return replace(self, **changes)

    def save(self, folder: Path) -> None:
        temporary = folder / f"{_FILE}.tmp"
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        temporary.replace(folder / _FILE)


Right: TypeAlias = Literal["read", "write"]

_BEARER: Final = "Bearer "


class AccessDenied(Exception):  # noqa: N818
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def bearer(header: str | None) -> str:
    return header.removeprefix(_BEARER) if header and header.startswith(_BEARER) else ""


def check_right(tokens: dict[str, str], header: str | None, right: Right) -> None:
    granted = tokens.get(bearer(header))
    if granted is None:
        raise AccessDenied(401, "Invalid credentials in Authorization header")
    if right == "write" and granted != "write":
        raise AccessDenied(403, "Forbidden: this token has no write access to this bucket")


class Signer:
    def __init__(self, folder: Path) -> None:
        path = folder / "secret"
        if not path.exists():
            temporary = folder / "secret.tmp"
            temporary.write_bytes(secrets.token_bytes(32))
            temporary.replace(path)
        self._secret = path.read_bytes()

    def sign(self, subject: str, expires: int) -> str:
        return f"{subject}.{expires}.{self._mac(subject, expires)}"

    def check(self, token: str) -> str:
        subject, _, rest = token.partition(".")
        expires, _, mac = rest.partition(".")
        if not expires.isdigit() or not hmac.compare_digest(mac, self._mac(subject, int(expires))):
            raise AccessDenied(401, "the token was not made here")
        if int(expires) <= time.time():
            raise AccessDenied(401, "the token has expired")
        return subject

    def check_cas(self, header: str | None, right: Right) -> None:
        granted = self.check(bearer(header))
        if granted not in ("xet-read", "xet-write"):
            raise AccessDenied(401, "the token is not for the CAS")
        if right == "write" and granted != "xet-write":
            raise AccessDenied(403, "the token may only read")

    def _mac(self, subject: str, expires: int) -> str:
        text = f"{subject}.{expires}".encode()
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()


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


_TABLES: Final = """
CREATE TABLE IF NOT EXISTS buckets (id TEXT PRIMARY KEY, created REAL NOT NULL);
CREATE TABLE IF NOT EXISTS entries (
    number INTEGER PRIMARY KEY AUTOINCREMENT, bucket TEXT NOT NULL, path TEXT NOT NULL,
    hash TEXT NOT NULL, size INTEGER NOT NULL, modified REAL NOT NULL, uploaded REAL NOT NULL,
    UNIQUE (bucket, path)
);
"""
_ADD: Final = """
INSERT INTO entries (bucket, path, hash, size, modified, uploaded) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (bucket, path) DO UPDATE SET hash = excluded.hash, size = excluded.size,
    modified = excluded.modified, uploaded = excluded.uploaded
"""


def iso_date(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Missing(Exception):  # noqa: N818
    pass


@dataclass(frozen=True, slots=True)
class BucketFile:
    number: int
    path: str
    hash: str
    size: int
    modified: float
    uploaded: float


class Buckets:
    """All buckets of a Hub. Thread-safe; each method is atomic."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        self._base = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._base.execute("PRAGMA journal_mode = WAL")
        self._base.execute("PRAGMA synchronous = FULL")
        self._base.executescript(_TABLES)
        self._stale: dict[str, list[BucketFile]] = {}
        self._stale_until = 0.0

    def create(self, bucket: str) -> None:
        with self._lock:
            row = (bucket, time.time())
            self._base.execute("INSERT OR IGNORE INTO buckets VALUES (?, ?)", row)

    def created(self, bucket: str) -> float:
        with self._lock:
            row = self._base.execute(
                "SELECT created FROM buckets WHERE id = ?", (bucket,)
            ).fetchone()
        if row is None:
            raise Missing(bucket)
        return float(row[0])

    def add(self, bucket: str, path: str, content: tuple[str, int], modified: float) -> None:
        with self._lock:
            self._base.execute(_ADD, (bucket, path, *content, modified, time.time()))

    def add_if_absent(
        self, bucket: str, path: str, content: tuple[str, int], modified: float
    ) -> bool:
        with self._lock:
            if self.find(bucket, [path]):
                return False
            self.add(bucket, path, content, modified)
            return True

    def delete(self, bucket: str, path: str) -> bool:
        with self._lock:
            done = self._base.execute(
                "DELETE FROM entries WHERE bucket = ? AND path = ?", (bucket, path)
            )
            return done.rowcount == 1

    def find(self, bucket: str, paths: Iterable[str]) -> list[BucketFile]:
        with self._lock:
            self.created(bucket)
            return [
                BucketFile(*row)
                for path in paths
                for row in self._base.execute(
                    "SELECT number, path, hash, size, modified, uploaded FROM entries "
                    "WHERE bucket = ? AND path = ?",
                    (bucket, path),
                )
            ]

    def entries(self, bucket: str) -> list[BucketFile]:
        with self._lock:
            self.created(bucket)
            rows = self._base.execute(
                "SELECT number, path, hash, size, modified, uploaded FROM entries "
                "WHERE bucket = ? ORDER BY number",
                (bucket,),
            )
            return [BucketFile(*row) for row in rows]

    def go_stale(self, seconds: float) -> None:
        with self._lock:
            ids = [row[0] for row in self._base.execute("SELECT id FROM buckets")]
            self._stale = {bucket: self.entries(bucket) for bucket in ids}
            self._stale_until = time.monotonic() + seconds

    def seen(self, bucket: str, paths: Sequence[str] | None = None) -> list[BucketFile]:
        with self._lock:
            if time.monotonic() < self._stale_until and bucket in self._stale:
                old = self._stale[bucket]
                return old if paths is None else [entry for entry in old if entry.path in paths]
            return self.entries(bucket) if paths is None else self.find(bucket, paths)


class World:
    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._session: Any = None
        self.url = url
        self.settings = Settings.load(folder)
        self.signer = Signer(folder)
        self.cas = Cas(folder / "cas")
        self.buckets = Buckets(folder / "buckets.sqlite")

    def change(self, changes: dict[str, Any]) -> None:
        self.settings = self.settings.changed(changes)
        self.settings.save(self._folder)

    def read(self, content: str, nbytes: int) -> bytes:
        if nbytes == 0:
            return b""
        import hf_xet  # noqa: PLC0415 - slow, and unused by most tests

        group = self._client(hf_xet).new_download_stream_group(**self._access("xet-read"))
        return b"".join(group.download_stream(hf_xet.XetFileInfo(content, nbytes)))

    def write(self, data: bytes) -> tuple[str, int]:
        import hf_xet  # noqa: PLC0415

        commit = self._client(hf_xet).new_upload_commit(**self._access("xet-write"))
        with commit:
            handle = commit.start_upload_bytes(data, sha256=hf_xet.SKIP_SHA256)
        info = handle.result().xet_info
        return str(info.hash), int(info.file_size)

    def _client(self, hf_xet: Any) -> Any:
        with self._lock:
            if self._session is None:
                self._session = hf_xet.XetSession()
            return self._session

    def _access(self, subject: str) -> dict[str, Any]:
        expires = int(time.time()) + 3600
        return {
            "endpoint": f"{self.url}/cas",
            "token": self.signer.sign(subject, expires),
            "token_expiry_unix_secs": expires,
        }
