"""The dashboard's web app: one page, its files, and read-only JSON documents."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as Segment
from fastapi.responses import FileResponse, JSONResponse
from starlette.middleware.gzip import GZipMiddleware
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from deltachain.control.access import LOOPBACK, host_of
from deltachain.tokens import Tokens
from spaces.dashboard import documents
from spaces.dashboard.watcher import LARGEST, Watcher

HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""Headers of every answer: nothing is loaded from elsewhere, no text becomes HTML or code, no page
frames this one."""


class Access:
    def __init__(self, token: str | Path) -> None:
        self._tokens = Tokens(token)

    def check(self, request: Request) -> None:
        host = host_of(request)
        if self._tokens:
            scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
            given = bearer if scheme.lower() == "bearer" else ""
            if not self._tokens.accepts(given):
                raise HTTPException(401, "wrong or missing token")
        elif host not in LOOPBACK or _is_of_another_site(request):
            raise HTTPException(403, "pages of other sites may not read this: set DELTACHAIN_TOKEN")


def _is_of_another_site(request: Request) -> bool:
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        return True
    return request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


REQUEST_S: Final = 30.0  # from the start of a connection, or the last answer, to the next one
CONNECTIONS: Final = 256  # limit of open connections

_Http: Any = AutoHTTPProtocol


class LimitedHttp(_Http):  # type: ignore[misc]
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
        """Close the connection, unless it is a WebSocket now."""
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
    """Return a protocol for ``uvicorn.Config(http=...)`` that closes late connections.

    uvicorn itself waits for ever. When all places are taken, the longest request gives up its own.
    """
    members = {"request_s": request_s, "most": most, "waiting": OrderedDict()}
    return type("LimitedHttp", (LimitedHttp,), members)


PAGES: Final = Path(__file__).parent / "page"

FILES: Final = {
    "": "index.html",
    "style.css": "style.css",
    "main.js": "main.js",
    "api.js": "api.js",
    "charts.js": "charts.js",
    "elements.js": "elements.js",
    "fleet.js": "fleet.js",
    "format.js": "format.js",
    "icon.svg": "icon.svg",
    "versions.js": "versions.js",
    "uPlot.esm.js": "vendor/uplot/uPlot.esm.js",
    "uPlot.min.css": "vendor/uplot/uPlot.min.css",
}

MOMENTS: Final = 240  # moments in a chart of the fleet

Number = Annotated[int, Query(ge=0, le=LARGEST)]


def create_app(watcher: Watcher, *, token: str | Path = "") -> FastAPI:
    """Create the web app of a dashboard; only what is below ``/api`` needs the token."""
    app = FastAPI(title="deltachain dashboard", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(GZipMiddleware, minimum_size=1024, compresslevel=5)
    app.middleware("http")(_with_headers)
    app.include_router(_documents(watcher, Access(token)))

    @app.get("/{path:path}")
    def file(path: str) -> FileResponse:
        if path not in FILES:
            raise HTTPException(404, "no such page")
        return FileResponse(PAGES / FILES[path])

    return app


def _documents(watcher: Watcher, access: Access) -> APIRouter:
    router = APIRouter(prefix="/api", dependencies=[Depends(access.check)])

    @router.get("/overview")
    def overview() -> JSONResponse:
        return JSONResponse(documents.overview_document(watcher.overview()))

    @router.get("/chain")
    def chain() -> JSONResponse:
        return JSONResponse(documents.chain_document(watcher.view))

    @router.get("/chart")
    def chart(first: Number = 0, last: Number = LARGEST) -> JSONResponse:
        return JSONResponse(
            documents.chart_document(watcher.view, watcher.phases.middles(), first, last)
        )

    @router.get("/versions")
    def versions(
        before: Number = LARGEST, count: Annotated[int, Query(ge=1, le=documents.PAGE)] = 20
    ) -> JSONResponse:
        return JSONResponse(documents.page_document(watcher.view, before, count))

    @router.get("/versions/{number}")
    def version(number: Annotated[int, Segment(ge=0, le=LARGEST)]) -> JSONResponse:
        found = documents.version_document(watcher.view, watcher.phases.of, number)
        if found is None:
            raise HTTPException(404, f"version {number} is not known")
        return JSONResponse(found)

    @router.get("/track")
    def track() -> JSONResponse:
        return JSONResponse(
            documents.track_document(watcher.track.moments(MOMENTS), watcher.engines)
        )

    return router


async def _with_headers(
    request: Request, follow: Callable[[Request], Awaitable[Response]]
) -> Response:
    response = await follow(request)
    response.headers.update(HEADERS)
    return response
