"""Replicas behind real HTTP servers, for whoever asks them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import uvicorn
from fastapi import FastAPI

from deltachain.control.routes import probes, router
from deltachain.control.server import Control
from deltachain.replica.leader import Leader
from deltachain.replica.settings import ReplicaSettings
from deltachain.status import Status
from deltachain.subscribe import SubscribeConfig
from tests.support.engine import Sharding
from tests.unit.replica.replicas import Followed


def status(version: int | None = 7, **fields: Any) -> Status:
    """Status of a replica that is ready at the head, but for the given fields."""
    usual: dict[str, Any] = {
        "url": "s3://b/x",
        "chain": "c" * 32,
        "version": version,
        "manifest": f"{version:064d}" if version is not None else None,
        "state": None,
        "staged": None,
        "head": version,
        "lag_versions": 0,
        "ready": True,
        "reason": "",
        "following": True,
        "paused": False,
        "pinned": False,
        "poisoned": False,
        "classes": {},
        "on_host": {},
        "ranks": [],
        "last": None,
        "trouble": "",
        "silence_s": 0.5,
        "engine": "fake/1.0",
        "deltachain": "0.1.0",
    }
    return Status(**usual | fields)


def app_of(
    leader: Leader | None,
    *,
    token: str | Path = "",
    is_open: bool = False,
    prefix: str = "/v1/deltachain",
) -> FastAPI:
    app = FastAPI()
    app.include_router(router, prefix=prefix)
    app.include_router(probes)
    app.state.deltachain = Control(leader, "follows nothing", token=token, is_open=is_open)
    return app


def followed(folder: Path) -> Iterator[Followed]:
    """An engine of two ranks that holds version 0 of 2."""
    made = Followed(Sharding(tp=2), folder)
    made.publish(1, 2)
    yield made
    made.close()


def leader_of(here: Followed) -> Iterator[Leader]:
    """Its leader, which has not caught up yet."""
    subscribe = SubscribeConfig(url=here.store.url)
    settings = ReplicaSettings(subscribe=subscribe, spool=here.folder / "spool")
    made = Leader(settings, here.engine, store=here.faulty)
    yield made
    made.stop()


@contextmanager
def served(app: Any, port: int = 0) -> Iterator[str]:
    """The address of an app that really listens."""
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", ws="none")
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    try:
        bound = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{bound}"
    finally:
        server.should_exit = True
        thread.join(20)
