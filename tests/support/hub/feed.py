"""Feed of the changes in a bucket, as server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tests.support.hub.changes import ChangeLog
from tests.support.hub.settings import Settings

_COMMENT: Final = b": keep-alive\n\n"


def events(
    changes: ChangeLog, bucket: str, start: int | None, settings: Settings
) -> AsyncIterator[bytes]:
    if settings.feed == "garbage":
        return _garbage()
    if settings.feed in ("stalled", "deaf"):
        return _silence(settings)
    if settings.feed == "flood":
        return _flood(settings)
    if settings.feed == "cut":
        return _cut(changes)
    if start is None:
        return _reset()
    return _live(changes, bucket, start, settings)


async def _live(
    changes: ChangeLog, bucket: str, start: int, settings: Settings
) -> AsyncIterator[bytes]:
    end = time.monotonic() + settings.stream_s
    is_ready = False
    with changes.woken() as woken:
        while (left_s := end - time.monotonic()) > 0:
            woken.clear()
            found = changes.after(bucket, start)
            if found:
                start = found[-1].number
                rows = [one.document for one in found]
                yield _event("changes", {"cursor": changes.cursor(start), "changes": rows})
            if not is_ready:
                is_ready = True
                yield _event("ready", {"cursor": changes.cursor(start)} if start else {})
            try:
                await asyncio.wait_for(woken.wait(), min(settings.ping_s, left_s))
            except TimeoutError:
                yield _COMMENT
    yield _event("reconnect", {"cursor": changes.cursor(start)})


async def _reset() -> AsyncIterator[bytes]:
    yield _event("reset", {"reason": "the resume point is too old"})


async def _silence(settings: Settings) -> AsyncIterator[bytes]:
    if settings.feed == "stalled":
        await asyncio.Event().wait()
    yield _event("ready", {})
    while True:
        await asyncio.sleep(settings.ping_s)
        yield _COMMENT


async def _flood(settings: Settings) -> AsyncIterator[bytes]:
    yield _event("ready", {})
    number = 0
    while True:
        number += 1
        keys = (f"manifests/{number * 100 + at:020d}.json" for at in range(100))
        rows = [{"path": f"{settings.feed_prefix}{key}", "op": "add"} for key in keys]
        yield _event("changes", {"cursor": str(number), "changes": rows})
        await asyncio.sleep(0.02)


async def _cut(changes: ChangeLog) -> AsyncIterator[bytes]:
    with changes.woken() as woken:
        yield _event("ready", {})
        await woken.wait()  # the stream ends without the change


async def _garbage() -> AsyncIterator[bytes]:
    yield b"event: changes\ndata: {\n\n\xff\xfe\0: \r\r\n"
    yield _event("changes", {"cursor": 7, "changes": "all"}) + _event("ready", [])
    for _ in range(80):
        yield b"\xee" * 65536


def _event(name: str, document: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(document)}\n\n".encode()


class EventStream(StreamingResponse):
    def __init__(self, pieces: AsyncIterator[bytes], closed: Callable[[], None]) -> None:
        super().__init__(pieces, media_type="text/event-stream")
        self._closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._closed()
