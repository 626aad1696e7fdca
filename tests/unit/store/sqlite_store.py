"""A store that a package of others adds: objects in a SQLite file, ``sqlite:///folder/name.db``."""

import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from typing_extensions import override

from deltachain.errors import ConfigError
from deltachain.store import Buffer, Capabilities, ObjectInfo, check_key
from deltachain.store.base import (
    Choose,
    SimpleStore,
    already_exists,
    bytes_view,
    check_prefix,
    guarded,
    not_found,
    split_url,
)

_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS objects (key TEXT PRIMARY KEY, modified REAL, data BLOB)"
)


@guarded
class SqliteStore(SimpleStore):
    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    @override
    def url(self) -> str:
        return self._path.as_uri().replace("file:", "sqlite:", 1)

    @property
    @override
    def capabilities(self) -> Capabilities:
        return Capabilities(conditional_put=True, list_consistent=True)

    @override
    def put(self, key: str, data: Buffer) -> str:
        row = (check_key(key), time.time(), bytes_view(data).tobytes())
        self._ask("INSERT OR REPLACE INTO objects VALUES (?, ?, ?)", row)
        return ""

    @override
    def put_if_absent(self, key: str, data: Buffer) -> None:
        row = (check_key(key), time.time(), bytes_view(data).tobytes())
        try:
            self._ask("INSERT INTO objects VALUES (?, ?, ?)", row)
        except sqlite3.IntegrityError as exc:
            raise already_exists(key, self.url) from exc

    @override
    def find(self, key: str) -> ObjectInfo | None:
        what = "SELECT key, length(data), modified FROM objects WHERE key = ?"
        return next((_info(row) for row in self._ask(what, (check_key(key),))), None)

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        prefix = check_prefix(prefix)
        rows = self._ask("SELECT key, length(data), modified FROM objects ORDER BY key")
        return iter([_info(row) for row in rows if row[0].startswith(prefix)])

    @override
    def delete(self, key: str) -> None:
        self._ask("DELETE FROM objects WHERE key = ?", (check_key(key),))

    @override
    def _read(self, key: str, choose: Choose) -> bytes:
        for (data,) in self._ask("SELECT data FROM objects WHERE key = ?", (key,)):
            start, length = choose(len(data))
            return bytes(data[start : start + length])
        raise not_found(key, self.url)

    def _ask(self, what: str, values: Sequence[object] = ()) -> Sequence[tuple[Any, ...]]:
        with closing(sqlite3.connect(self._path, timeout=60)) as connection, connection:
            connection.execute(_SCHEMA)
            return connection.execute(what, values).fetchall()


def open_sqlite(url: str, options: Mapping[str, Any], *, writer: bool) -> SqliteStore:  # noqa: ARG001
    path = unquote(split_url(url, options).path)
    if not url.lower().startswith("sqlite:///") or not Path(path).name:
        raise ConfigError("sqlite:// store URLs name a file", hint="sqlite:///folder/name.db")
    return SqliteStore(Path(path))


def _info(row: tuple[Any, ...]) -> ObjectInfo:
    return ObjectInfo(key=row[0], nbytes=row[1], modified=row[2])
