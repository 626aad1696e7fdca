"""What goes wrong by script between a client and the emulated Hub, and the counting of requests."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltachain.testing.hub.auth import bearer
from deltachain.testing.hub.limits import Allowance, Limits, route_of
from deltachain.testing.hub.settings import Settings

RequestAction: TypeAlias = Literal["status", "stall", "refuse", "lose-reply", "corrupt", "truncate"]
"""What happens to a request.

``status`` is answered so without being looked at; ``stall`` is answered ``seconds`` later;
``refuse`` has its connection cut before it is looked at, and ``lose-reply`` after; ``corrupt`` has
one bit in the middle of the reply flipped; ``truncate`` has the second half of it cut off.
"""

_Headers: TypeAlias = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFault:
    """One line of the script.

    Attributes:
        do: What happens.
        path: A regular expression that the path has to begin with.
        method: The method that it is about; empty for every one.
        times: How many requests it strikes.
        skip: How many it lets pass before.
        status: What ``status`` is answered with.
        retry_after: The header of that name in such an answer; None without one.
        seconds: How long ``stall`` takes.
    """

    do: RequestAction
    path: str = "/"
    method: str = ""
    times: int = 1
    skip: int = 0
    status: int = 503
    retry_after: int | None = None
    seconds: float = 0.0


class Script:
    """The faults to come. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[RequestFault] = []

    def add(self, fault: RequestFault) -> None:
        """Let one more thing go wrong."""
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        """Let nothing go wrong any more."""
        with self._lock:
            self._faults.clear()

    def left(self) -> int:
        """How many requests are still to be struck."""
        with self._lock:
            return sum(fault.times for fault in self._faults)

    def take(self, method: str, path: str) -> RequestFault | None:
        """The fault that strikes a request."""
        with self._lock:
            for number, fault in enumerate(self._faults):
                if fault.method not in ("", method) or re.match(fault.path, path) is None:
                    continue
                if fault.skip:
                    self._faults[number] = replace(fault, skip=fault.skip - 1)
                    continue
                self._faults[number] = replace(fault, times=fault.times - 1)
                if fault.times == 1:
                    del self._faults[number]
                return fault
        return None


class Door:
    """What every request passes: it is counted, limited and struck by faults.

    Args:
        app: What answers the requests.
        script: What goes wrong.
        limits: The counts.
        settings: How many requests a token has.
        abort: Cuts the connection of a client address.
    """

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
        """Answer one request, or not."""
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
            await asyncio.sleep(0.05)  # for the half to leave before the connection is cut
            self._abort(scope["client"])
            return
        await send({"type": "http.response.body", "body": bytes(body)})

    async def _collect(self, scope: Scope, receive: Receive) -> tuple[Message, bytearray]:
        """The reply to a request, kept back."""
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
    """Take the body of a request that nobody reads: what follows on the connection is another."""
    while (await receive()).get("more_body", False):
        pass


def _with_headers(send: Send, headers: _Headers) -> Send:
    """Send, with these headers on every reply."""
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
