"""The dashboard's web app: one page, its files, and read-only JSON documents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Final

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as Segment
from fastapi.responses import FileResponse, JSONResponse
from starlette.middleware.gzip import GZipMiddleware

from deltachain.dashboard.access import HEADERS, Access
from deltachain.dashboard.documents import (
    PAGE,
    chain_document,
    chart_document,
    overview_document,
    page_document,
    track_document,
    version_document,
)
from deltachain.dashboard.replica_report import LARGEST
from deltachain.dashboard.watcher import Watcher

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
"""Files of the page, by path."""

MOMENTS: Final = 240
"""Moments in a chart of the fleet."""

Number = Annotated[int, Query(ge=0, le=LARGEST)]


def create_app(watcher: Watcher, *, token: str | Path = "") -> FastAPI:
    """Create the web app of a dashboard.

    Files of the page need no token, since they hold no data; everything below ``/api`` does.

    Args:
        watcher: What is shown; closing it is up to the caller.
        token: Required bearer token; empty for none, where only this machine can connect.
    """
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
    """Return the routes of all JSON documents."""
    router = APIRouter(prefix="/api", dependencies=[Depends(access.check)])

    @router.get("/overview")
    def overview() -> JSONResponse:
        return JSONResponse(overview_document(watcher.overview()))

    @router.get("/chain")
    def chain() -> JSONResponse:
        return JSONResponse(chain_document(watcher.view))

    @router.get("/chart")
    def chart(first: Number = 0, last: Number = LARGEST) -> JSONResponse:
        return JSONResponse(chart_document(watcher.view, watcher.phases.middles(), first, last))

    @router.get("/versions")
    def versions(
        before: Number = LARGEST, count: Annotated[int, Query(ge=1, le=PAGE)] = 20
    ) -> JSONResponse:
        return JSONResponse(page_document(watcher.view, before, count))

    @router.get("/versions/{number}")
    def version(number: Annotated[int, Segment(ge=0, le=LARGEST)]) -> JSONResponse:
        found = version_document(watcher.view, watcher.phases.of, number)
        if found is None:
            raise HTTPException(404, f"version {number} is not known")
        return JSONResponse(found)

    @router.get("/track")
    def track() -> JSONResponse:
        return JSONResponse(track_document(watcher.track.moments(MOMENTS), watcher.engines))

    return router


async def _with_headers(
    request: Request, follow: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Add the headers of every answer, errors too."""
    response = await follow(request)
    response.headers.update(HEADERS)
    return response
