"""The server's side: deltachain's routes, the leader, and SGLang's own route for weight updates.

``POST /update_weights_from_disk {"model_path": "deltachain:7"}`` is the same as deltachain's
``update``.
"""

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, HTTPException

from deltachain.control import server as control_server
from deltachain.control.access import LOOPBACK
from deltachain.control.routes import probes, router
from deltachain.environment import is_strict, refused
from deltachain.errors import DeltaChainError, UnsupportedEngineError
from deltachain.replica.leader import Leader
from deltachain.replica.settings import ReplicaSettings

from . import PREFIX, SCHEME, compat, loading
from .start_check import on_engine

# SGLang releases its cache, captured graphs and weights, all or some of them, and resumes them. The
# content of weights after they are resumed is unknown.


async def on_sleep(original: Callable[..., Any], server: Any, obj: Any, request: Any = None) -> Any:
    """Wrap ``release_memory_occupation`` in the server, which from then on is not ready."""
    control = control_server.leading(compat.app())
    if control is not None:
        kinds = compat.kinds(obj.tags)
        await control.run(lambda leader: control_server.fall_asleep(leader, kinds), None)
    return await original(server, obj, request)


async def on_wake(original: Callable[..., Any], server: Any, obj: Any, request: Any = None) -> Any:
    """Wrap ``resume_memory_occupation``: prove or heal the weights before it is ready."""
    found = await original(server, obj, request)
    control = control_server.leading(compat.app())
    if control is not None:
        kinds = compat.kinds(obj.tags)
        with suppress(DeltaChainError, HTTPException):  # the error is part of its status
            await control.run(
                lambda leader: control_server.wake_up(leader, kinds, compat.WEIGHTS), None, "update"
            )
    return found


logger = logging.getLogger(__name__)


def hook_server() -> None:
    """Add deltachain's routes to SGLang's server, and start a leader once its engine is up."""
    app = compat.app()
    if any(getattr(route, "path", "").startswith(PREFIX) for route in app.routes):
        return  # SGLang may load plugins again
    compat.serve(router, PREFIX)
    compat.serve(probes, "")
    control_server.leave_at_end(app)
    app.router.lifespan_context = _leading(app.router.lifespan_context)
    compat.hook(compat.TOLD, on_update)
    compat.hook(compat.CHECKED, on_check)
    compat.hook(compat.SLEPT, on_sleep)
    compat.hook(compat.WOKEN, on_wake)
    compat.hook(compat.RUN, on_run)
    compat.hook(compat.ENGINE, on_engine)


def _leading(original: Callable[[FastAPI], Any]) -> Callable[[FastAPI], Any]:
    """Wrap the lifespan of the server: accept no request before its leader has caught up."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        loop = asyncio.get_running_loop()
        host, port, key = compat.exposure()
        try:
            control = await control_server.lead(
                lambda settings: _engine(loop, settings),
                os.environ,
                key=key,
                is_open=host in LOOPBACK,
                is_guarded=bool(key),
                address=f"{host}:{port}",
            )
        except SystemExit as exc:
            compat.end(exc)
        app.state.deltachain = control
        async with original(app) as state:
            yield state

    return lifespan


def _engine(loop: asyncio.AbstractEventLoop, settings: ReplicaSettings) -> control_server.LedEngine:
    from .engine import SglangEngine

    return SglangEngine(compat.manager(), loop, settings), loading.checkpoint()


async def on_update(
    original: Callable[..., Any], server: Any, obj: Any, request: Any = None
) -> tuple[bool, str, int]:
    """Wrap ``update_weights_from_disk`` in the server: a path with ``SCHEME`` names a version.

    Weights of any other path are loaded, found to differ from the chain's, and replaced by these.
    """
    control = control_server.control_in(compat.app())
    if not obj.model_path.startswith(SCHEME):
        found: tuple[bool, str, int] = await original(server, obj, request)
        if found[0] and control is not None and control.leader is not None:
            with suppress(DeltaChainError, HTTPException):  # the error is part of its status
                await control.run(Leader.scrub, request, "update")
        return found
    if control is None or control.leader is None:
        return False, control.refusal if control else "the engine is not up yet", 0
    named = obj.model_path.removeprefix(SCHEME)
    if not re.fullmatch(r"[0-9]{0,16}", named):
        return False, f"{named[:20]!r} is no version: {SCHEME}7, or {SCHEME} for the head", 0
    version = int(named) if named else None
    try:
        if request is not None and not control.access.is_guarded:
            control.access.check(request)  # SGLang's own route is open if the server has no key
        await control.run(lambda leader: leader.update(version), request, "update")
    except DeltaChainError as exc:
        return False, str(exc), 0
    except HTTPException as exc:
        return False, str(exc.detail), 0
    return True, f"version {control.leader.subscriber.version}", 0


async def on_check(original: Callable[..., Any], server: Any, obj: Any, request: Any = None) -> Any:
    """Wrap ``check_weights`` in the server: only the leader may send deltachain's requests."""
    if obj.action.startswith(SCHEME):
        return False, "only this server's leader asks that", None, None
    return await original(server, obj, request)


def on_run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap the start of the server: other front ends load no plugins, so would have no leader."""
    count = compat.front_ends()
    if count > 1 and os.environ.get("DELTACHAIN_URL"):
        exc = UnsupportedEngineError(
            f"this server has {count} tokenizer workers, and they load no routes of deltachain",
            hint="start it with --tokenizer-worker-num 1",
        )
        if is_strict(os.environ):
            raise refused(exc) from exc
        logger.error("deltachain follows nothing: %s", exc)
    return original(*args, **kwargs)
