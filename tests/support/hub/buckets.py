"""Buckets: content by path, in SQLite, committed before a request is answered."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

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

    def create(self, bucket: str) -> bool:
        with self._lock:
            done = self._base.execute(
                "INSERT OR IGNORE INTO buckets VALUES (?, ?)", (bucket, time.time())
            )
            return done.rowcount == 1

    def remove(self, bucket: str) -> None:
        with self._lock:
            self.created(bucket)
            self._base.execute("DELETE FROM entries WHERE bucket = ?", (bucket,))
            self._base.execute("DELETE FROM buckets WHERE id = ?", (bucket,))

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
