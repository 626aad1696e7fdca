"""Connections of a uvicorn server: how long a request may take, and how many there may be."""

import asyncio
from collections import OrderedDict
from typing import Any, Final

from uvicorn.protocols.http.auto import AutoHTTPProtocol

REQUEST_S: Final = 20.0
"""Seconds from the start of a connection, or the answer before, to the end of the next answer."""

CONNECTIONS: Final = 2048

_Http: Any = AutoHTTPProtocol


class LimitedHttp(_Http):  # type: ignore[misc]
    """Protocol that closes late connections; see :func:`limited`."""

    request_s: float
    most: int
    waiting: "OrderedDict[LimitedHttp, None]"  # the one that has lasted longest first
    late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._begin()
        if len(self.connections) > self.most:
            next(iter(self.waiting)).end()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def end(self) -> None:
        self._forget()
        if self.transport.get_protocol() is self:
            self.transport.abort()

    def _begin(self) -> None:
        self._forget()
        self.late = asyncio.get_running_loop().call_later(self.request_s, self.end)
        self.waiting[self] = None

    def _forget(self) -> None:
        self.waiting.pop(self, None)
        if self.late is not None:
            self.late.cancel()


def limited(*, request_s: float = REQUEST_S, most: int = CONNECTIONS) -> type[asyncio.Protocol]:
    members = {"request_s": request_s, "most": most, "waiting": OrderedDict()}
    return type("LimitedHttp", (LimitedHttp,), members)
