"""Scripted faults of the emulated Hub, and counting of requests."""

import asyncio
import math
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.support.hub.world import Settings, bearer

_BUCKET_ROUTE: Final = re.compile(r"/api/buckets/[^/]+/[^/]+/(?P<route>[a-z-]+)")


def route_of(path: str) -> str:
    if path.startswith("/s3/"):
        return "s3"
    if not path.startswith("/api/"):
        return ""
    match = _BUCKET_ROUTE.match(path)
    return match["route"] if match else path.split("/")[2]


@dataclass(slots=True)
class _Window:
    began: float
    used: int = 0


@dataclass(frozen=True, slots=True)
class Allowance:
    allowed: bool
    headers: dict[str, str]
    retry_after: int


class Limits:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: dict[str, _Window] = {}
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)

    def count(self, token: str, method: str, route: str, settings: Settings) -> Allowance:
        most = settings.calls
        now = time.monotonic()
        with self._lock:
            self._counts[token][f"{method} {route}"] += 1
            window = self._windows.setdefault(token, _Window(now))
            if now >= window.began + settings.window_s:
                window.began, window.used = now, 0
            allowed = window.used < most
            window.used += allowed
            if not allowed:
                self._counts[token]["refused"] += 1
            left = math.ceil(window.began + settings.window_s - now)
            remaining = most - window.used
        span = math.ceil(settings.window_s)
        headers = {
            "RateLimit": f'"api";r={max(0, remaining)};t={left}',
            "RateLimit-Policy": f'"fixed window";"api";q={most};w={span}',
        }
        return Allowance(allowed, headers, left)

    def counts(self) -> dict[str, dict[str, int]]:
        with self._lock:
            return {token: dict(counted) for token, counted in self._counts.items()}

    def restart(self) -> None:
        with self._lock:
            self._windows.clear()


RequestAction: TypeAlias = Literal["status", "stall", "refuse", "lose-reply", "corrupt", "truncate"]
"""Actions of a fault.

``status`` answers with a status code instead; ``stall`` delays the reply by ``seconds``; ``refuse``
aborts the connection before the request is processed, ``lose-reply`` after it; ``corrupt`` flips a
bit in the middle of the reply; ``truncate`` cuts off its second half.
"""

_Headers: TypeAlias = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFault:
    """One scripted fault."""

    do: RequestAction
    path: str = "/"
    method: str = ""
    times: int = 1
    status: int = 503
    retry_after: int | None = None
    seconds: float = 0.0


class Script:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[RequestFault] = []

    def add(self, fault: RequestFault) -> None:
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()

    def left(self) -> int:
        with self._lock:
            return sum(fault.times for fault in self._faults)

    def take(self, method: str, path: str) -> RequestFault | None:
        with self._lock:
            for number, fault in enumerate(self._faults):
                if fault.method not in ("", method) or re.match(fault.path, path) is None:
                    continue
                self._faults[number] = replace(fault, times=fault.times - 1)
                if fault.times == 1:
                    del self._faults[number]
                return fault
        return None


class Door:
    def __init__(
        self,
        app: ASGIApp,
        *,
        script: Script,
        limits: Limits,
        settings: Callable[[], Settings],
        abort: Callable[[tuple[str, int]], None],
    ) -> None:
        self._app = app
        self._script = script
        self._limits = limits
        self._settings = settings
        self._abort = abort

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/_admin"):
            await self._app(scope, receive, send)
            return
        verdict = self._count(scope)
        headers = verdict.headers if verdict else {}
        if verdict and not verdict.allowed:
            await _drain(receive)
            refusal = {**headers, "Retry-After": str(verdict.retry_after)}
            await _reply(send, 429, refusal, b'{"error":"Too Many Requests"}')
            return
        fault = self._script.take(scope["method"], scope["path"])
        if fault is None:
            await self._app(scope, receive, _with_headers(send, headers))
        else:
            await self._strike(fault, scope, receive, _with_headers(send, headers))

    def _count(self, scope: Scope) -> Allowance | None:
        route = route_of(scope["path"])
        if not route:
            return None
        given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        token = bearer(given) or ("s3" if route == "s3" else "nobody")
        return self._limits.count(token, scope["method"], route, self._settings())

    async def _strike(
        self, fault: RequestFault, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if fault.do == "status":
            await _drain(receive)
            headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
            await _reply(send, fault.status, headers, b'{"error":"by script"}')
        elif fault.do == "stall":
            await asyncio.sleep(fault.seconds)
            await self._app(scope, receive, send)
        elif fault.do == "refuse":
            self._abort(scope["client"])
        else:
            start, body = await self._collect(scope, receive)
            if fault.do == "corrupt" and body:
                body[len(body) // 2] ^= 0x10
            await self._spoil(fault, scope, send, start, body)

    async def _spoil(
        self, fault: RequestFault, scope: Scope, send: Send, start: Message, body: bytearray
    ) -> None:
        if fault.do == "lose-reply":
            self._abort(scope["client"])
            return
        await send(start)
        if fault.do == "truncate":
            half = bytes(body[: len(body) // 2])
            await send({"type": "http.response.body", "body": half, "more_body": True})
            await asyncio.sleep(0.05)  # lets the first half leave before the connection is aborted
            self._abort(scope["client"])
            return
        await send({"type": "http.response.body", "body": bytes(body)})

    async def _collect(self, scope: Scope, receive: Receive) -> tuple[Message, bytearray]:
        started: list[Message] = []
        body = bytearray()

        async def keep(message: Message) -> None:
            if message["type"] == "http.response.start":
                started.append(message)
            else:
                body.extend(message.get("body", b""))

        await self._app(scope, receive, keep)
        return started[0], body


async def _drain(receive: Receive) -> None:
    while (await receive()).get("more_body", False):
        pass


def _with_headers(send: Send, headers: _Headers) -> Send:
    extra = _encoded(headers)

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *extra]}
        await send(message)

    return sending


async def _reply(send: Send, status: int, headers: _Headers, body: bytes) -> None:
    fixed = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    start: dict[str, Any] = {"type": "http.response.start", "status": status}
    await send(start | {"headers": _encoded(fixed | headers)})
    await send({"type": "http.response.body", "body": body})


def _encoded(headers: _Headers) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]
