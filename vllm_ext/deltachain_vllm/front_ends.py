"""Several front ends of one vLLM server: the first one leads, the others pass its requests on.

They share one address, so no client chooses which of them it asks. All of them reach every engine,
and pauses and versions are the engines' own, so one leader is enough.
"""

import asyncio
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from deltachain.errors import ConfigError
from deltachain.format.keys import object_digest
from deltachain.replica.settings import spool_folder
from deltachain.replica.spool import PREFIX, Spool, SpoolIndex

LOOK_S: Final = 0.2  # seconds between two looks whether the first front end leads yet

LONGEST: Final = 107  # bytes of the path of a socket, by Linux


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # they are the engine's server's


def _socket() -> Path:
    """Return the socket of the first front end; those of a server have one parent process."""
    server = object_digest(f"{socket.gethostname()}:{os.getppid()}".encode())
    path = spool_folder(os.environ) / f"{PREFIX}{server[:16]}" / "front"
    if len(os.fsencode(path)) > LONGEST:
        raise ConfigError(
            f"{path} is too long for a socket, by which front ends of this server meet",
            hint="set DELTACHAIN_SPOOL to a folder with a shorter path, or --api-server-count 1",
        )
    return path


async def answer(app: FastAPI) -> tuple[Spool, uvicorn.Server, "asyncio.Task[None]"]:
    """Answer what other front ends pass on, with the whole app; keep what this returns alive."""
    path = _socket()
    spool = Spool.create(path.parent.parent, SpoolIndex(), path.parent.name)
    quiet: dict[str, Any] = {"lifespan": "off", "log_config": None, "access_log": False}
    server = _Server(uvicorn.Config(app, uds=str(path), **quiet))
    return spool, server, asyncio.create_task(server.serve())


async def pass_on(app: FastAPI, paths: Sequence[str]) -> None:
    """Pass requests for some paths on to the first front end; return once it answers."""
    fresh = httpx.Limits(max_keepalive_connections=0)  # the other side closes idle connections
    transport = httpx.AsyncHTTPTransport(uds=str(_socket()), limits=fresh)
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
