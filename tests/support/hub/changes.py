"""Changes of all buckets since the Hub started, numbered, for its feeds."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

_KEPT: Final = 1000


class RefusedResume(Exception):  # noqa: N818
    pass


class TooManyStreams(Exception):  # noqa: N818
    pass


@dataclass(frozen=True, slots=True)
class BucketChange:
    number: int
    bucket: str
    seconds: float
    document: Mapping[str, Any]


class ChangeLog:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes: deque[BucketChange] = deque(maxlen=_KEPT)
        self._first = 1
        self._last = 0
        self._boot = secrets.token_hex(4)
        self._began = time.time()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._streams: Counter[str] = Counter()

    def add(self, bucket: str, document: Mapping[str, Any]) -> None:
        with self._lock:
            self._last += 1
            self._changes.append(BucketChange(self._last, bucket, time.time(), document))
            self._first = self._changes[0].number
            waiting = list(self._waiting)
        for loop, event in waiting:
            loop.call_soon_threadsafe(event.set)

    def after(self, bucket: str, number: int) -> list[BucketChange]:
        with self._lock:
            return [one for one in self._changes if one.bucket == bucket and one.number > number]

    def start(self, cursor: str, since: str) -> int | None:
        with self._lock:
            if cursor:
                boot, _, number = cursor.partition(".")
                if not number.isdigit():
                    raise RefusedResume(cursor)
                is_known = boot == self._boot and self._first - 1 <= int(number) <= self._last
                return int(number) if is_known else None
            if not since:
                return self._last
            try:
                seconds = datetime.fromisoformat(since).timestamp()
            except ValueError:
                raise RefusedResume(since) from None
            if seconds < self._began:
                return None
            before = [one.number for one in self._changes if one.seconds < seconds]
            return max(before, default=self._first - 1)

    def cursor(self, number: int) -> str:
        return f"{self._boot}.{number}"

    def open_stream(self, token: str, most: int) -> None:
        with self._lock:
            if self._streams[token] >= most:
                raise TooManyStreams
            self._streams[token] += 1

    def close_stream(self, token: str) -> None:
        with self._lock:
            self._streams[token] -= 1

    def streams(self) -> int:
        with self._lock:
            return sum(self._streams.values())

    @contextmanager
    def woken(self) -> Iterator[asyncio.Event]:
        mine = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            self._waiting.add(mine)
        try:
            yield mine[1]
        finally:
            with self._lock:
                self._waiting.discard(mine)
