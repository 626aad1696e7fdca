"""Several front ends of one vLLM server: the first one leads, the others pass its requests on.

They share one address, so no client chooses which of them it asks. All of them reach every engine,
and pauses and versions are the engines' own, so one leader is enough.
"""

import asyncio
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from deltachain.format.keys import object_digest
from deltachain.replica.settings import spool_folder
from deltachain.replica.spool import PREFIX, Spool, SpoolIndex

LOOK_S: Final = 0.2  # seconds between two looks whether the first front end leads yet


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # they are the engine's server's


def _folder() -> Path:
    """Return the folder of the first front end's socket; those of a server have one parent."""
    server = object_digest(f"{socket.gethostname()}:{os.getppid()}".encode())
    return spool_folder(os.environ) / f"{PREFIX}{server[:16]}"


def _socket(folder: int) -> str:
    """Return a short path of the socket in an open folder: Linux allows 107 bytes."""
    return f"/proc/self/fd/{folder}/front"


async def answer(app: FastAPI) -> tuple[Spool, uvicorn.Server, "asyncio.Task[None]"]:
    """Answer what other front ends pass on, with the whole app; keep what this returns alive."""
    folder = _folder()
    spool = Spool.create(folder.parent, SpoolIndex(), folder.name)
    path = _socket(os.open(folder, os.O_RDONLY))
    quiet: dict[str, Any] = {"lifespan": "off", "log_config": None, "access_log": False}
    server = _Server(uvicorn.Config(app, uds=path, **quiet))
    return spool, server, asyncio.create_task(server.serve())


async def first_front_end() -> httpx.AsyncClient:
    """Return a client of the first front end, once that answers."""
    fresh = httpx.Limits(max_keepalive_connections=0)  # the other side closes idle connections
    while True:
        with suppress(FileNotFoundError):
            folder = os.open(_folder(), os.O_RDONLY)
            transport = httpx.AsyncHTTPTransport(uds=_socket(folder), limits=fresh)
            # An update takes as long as its store does.
            client = httpx.AsyncClient(transport=transport, base_url="http://front", timeout=None)  # noqa: S113
            with suppress(httpx.HTTPError):
                await client.get("/ping")  # any answer will do
                return client
            os.close(folder)
        await asyncio.sleep(LOOK_S)


def pass_on(app: FastAPI, paths: Sequence[str], client: httpx.AsyncClient) -> None:
    """Pass requests for some paths on to a leader."""

    async def passed(request: Request) -> Response:
        url = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        raw, body = request.headers.raw, request.stream()
        try:
            found = await client.request(request.method, url, headers=raw, content=body)
        except httpx.HTTPError as exc:
            return PlainTextResponse(f"the server that leads did not answer: {exc!r}", 503)
        kind: dict[str, Any] = {"media_type": found.headers.get("content-type")}
        return Response(found.content, found.status_code, **kind)

    app.router.routes[:0] = [Route(path, passed, methods=["GET", "POST"]) for path in paths]
