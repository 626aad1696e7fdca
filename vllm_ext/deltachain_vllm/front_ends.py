"""Several front ends of one vLLM server: the first one leads, the others pass its requests on.

They share one address, so no client chooses which of them it asks. All of them reach every engine,
and pauses and versions are the engines' own, so one leader is enough.
"""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from deltachain.replica.settings import spool_folder
from deltachain.replica.spool import PREFIX, Spool, SpoolIndex

LOOK_S: Final = 0.2  # seconds between two looks whether the first front end leads yet


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # they are the engine's server's


def _folder() -> Path:
    """Return the folder of this server's socket; its front ends have one parent process."""
    return spool_folder(os.environ) / f"{PREFIX}front-{os.getppid()}"


async def answer(app: FastAPI) -> tuple[Spool, uvicorn.Server, "asyncio.Task[None]"]:
    """Answer what other front ends pass on, with the whole app; keep what this returns alive."""
    folder = _folder()
    spool = Spool.create(folder.parent, SpoolIndex(), folder.name)
    quiet: dict[str, Any] = {"lifespan": "off", "log_config": None, "access_log": False}
    config = uvicorn.Config(app, uds=str(folder / "front"), **quiet)
    server = _Server(config)
    return spool, server, asyncio.create_task(server.serve())


async def pass_on(app: FastAPI, paths: Sequence[str]) -> None:
    """Pass requests for some paths on to the first front end; return once it answers."""
    fresh = httpx.Limits(max_keepalive_connections=0)  # the other side closes idle connections
    transport = httpx.AsyncHTTPTransport(uds=str(_folder() / "front"), limits=fresh)
    # An update takes as long as its store does.
    client = httpx.AsyncClient(transport=transport, base_url="http://front", timeout=None)  # noqa: S113

    async def passed(request: Request) -> Response:
        url = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        raw, body = request.headers.raw, request.stream()
        try:
            found = await client.request(request.method, url, headers=raw, content=body)
        except httpx.HTTPError as exc:
            return PlainTextResponse(f"the front end that leads did not answer: {exc!r}", 503)
        kind: dict[str, Any] = {"media_type": found.headers.get("content-type")}
        return Response(found.content, found.status_code, **kind)

    while True:
        try:
            await client.get("/ping")  # any answer will do
            break
        except httpx.HTTPError:
            await asyncio.sleep(LOOK_S)
    app.router.routes[:0] = [Route(path, passed, methods=["GET", "POST"]) for path in paths]
