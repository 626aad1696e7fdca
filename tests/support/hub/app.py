"""Process of the emulated Hub: ``python -m tests.support.hub.app FOLDER``."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import Body, FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from tests.support.hub import gateway, hub, xet
from tests.support.hub.faults import Door, Limits, RequestFault, Script
from tests.support.hub.world import Settings, World

_PORT = "port"

_connections: dict[tuple[str, int], asyncio.Transport] = {}


class _Connection(H11Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is not None:
            _connections[self.client] = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self.client is not None:
            _connections.pop(self.client, None)
        super().connection_lost(exc)


def _abort(client: tuple[str, int]) -> None:
    if (transport := _connections.get((client[0], client[1]))) is not None:
        transport.abort()


def make_app(world: World) -> Door:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    script, limits = Script(), Limits()
    hub.add_errors(app)
    app.include_router(hub.make_routes(world))
    app.include_router(xet.make_routes(world))
    app.include_router(gateway.make_routes(world))
    _add_controls(app, world, script, limits)
    return Door(app, script=script, limits=limits, settings=lambda: world.settings, abort=_abort)


def _add_controls(app: FastAPI, world: World, script: Script, limits: Limits) -> None:
    @app.get("/_admin/counts")
    def counts() -> dict[str, dict[str, int]]:
        return limits.counts()

    @app.post("/_admin/settings")
    def change(changes: Annotated[dict[str, Any], Body()]) -> None:
        world.change(changes)
        limits.restart()

    @app.post("/_admin/reset")
    def reset(changes: Annotated[dict[str, Any], Body()]) -> None:
        world.change(asdict(Settings()) | changes)
        limits.restart()
        script.clear()
        world.buckets.go_stale(0)

    _add_faults(app, world, script)


def _add_faults(app: FastAPI, world: World, script: Script) -> None:
    @app.post("/_admin/faults")
    def add_fault(fault: Annotated[dict[str, Any], Body()]) -> None:
        script.add(RequestFault(**fault))

    @app.get("/_admin/faults")
    def faults_left() -> int:
        return script.left()

    @app.delete("/_admin/faults")
    def clear_faults() -> None:
        script.clear()

    @app.post("/_admin/stale")
    def go_stale(seconds: Annotated[float, Body(embed=True)]) -> None:
        world.buckets.go_stale(seconds)


def _listen(folder: Path) -> socket.socket:
    saved = folder / _PORT
    # An explicit protocol, because asyncio sets TCP_NODELAY only with IPPROTO_TCP.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", int(saved.read_text()) if saved.exists() else 0))
    temporary = folder / f"{_PORT}.tmp"
    temporary.write_text(str(listening.getsockname()[1]))
    temporary.replace(saved)
    return listening


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


def main(folder: Path) -> None:
    listening = _listen(folder)
    world = World(folder, f"http://127.0.0.1:{listening.getsockname()[1]}")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    config = uvicorn.Config(
        make_app(world),
        http=_Connection,
        loop="asyncio",
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
