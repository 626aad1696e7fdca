"""Sleep and wake-up of a vLLM server, and the checks before it is ready again.

vLLM's routes for them are wrapped by deltachain's, as endpoint plugins may do. At level 1 vLLM
moves weights to the host and drops its cache, at level 2 it drops both; at level 0 it only stops
generating. The content of weights after a wake-up is unknown.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import wraps
from typing import Any, Final

from fastapi import FastAPI, HTTPException, Request
from fastapi.routing import APIRoute

from deltachain.control.server import Control, fall_asleep, wake_up
from deltachain.errors import DeltaChainError
from deltachain.replica.leader import Leader

WEIGHTS: Final = "weights"
CACHE: Final = "kv_cache"
SCHEDULING: Final = "scheduling"
"""vLLM's tag for its scheduler."""

Endpoint = Callable[..., Awaitable[Any]]


def attach_sleep(app: FastAPI) -> None:
    """Wrap the routes that put the server to sleep and wake it, if it has them."""
    around: dict[str, Callable[[Endpoint], Endpoint]] = {
        "/sleep": _sleeping,
        "/release_kv_cache_memory": _releasing,
        "/wake_up": _waking,
    }
    for route in [*app.routes]:
        if isinstance(route, APIRoute) and route.path in around:
            endpoint = around[route.path](route.endpoint)
            app.add_api_route(route.path, endpoint, methods=sorted(route.methods or ()))


def slept(level: int) -> frozenset[str]:
    """Return the tags that sleep at a level."""
    return frozenset({WEIGHTS, CACHE}) if level > 0 else frozenset({SCHEDULING})


def woken(tags: list[str]) -> frozenset[str]:
    """Return the tags that a request wakes; all if it has none. The last also wakes scheduling."""
    return frozenset(tags or (WEIGHTS, CACHE, SCHEDULING))


def _sleeping(original: Endpoint) -> Endpoint:
    @wraps(original)
    async def sleep(raw_request: Request, **asked: Any) -> Any:  # noqa: ANN401 - as vLLM's
        return await _asleep(raw_request, slept(asked["level"]), original(raw_request, **asked))

    return sleep


def _releasing(original: Endpoint) -> Endpoint:
    @wraps(original)
    async def release(raw_request: Request) -> Any:  # noqa: ANN401
        return await _asleep(raw_request, frozenset({CACHE}), original(raw_request))

    return release


def _waking(original: Endpoint) -> Endpoint:
    @wraps(original)
    async def wake(raw_request: Request) -> Any:  # noqa: ANN401
        found = await original(raw_request)
        control = _control(raw_request)
        if control is not None:
            kinds = woken(raw_request.query_params.getlist("tags"))
            with suppress(DeltaChainError, HTTPException):  # the error is part of its status
                await control.run(lambda leader: _wake(leader, kinds), None, "update")
        return found

    return wake


async def _asleep(request: Request, kinds: frozenset[str], rest: Awaitable[Any]) -> Any:  # noqa: ANN401
    """Become unready, then let vLLM do the rest; restore readiness if that fails."""
    control = _control(request)
    if control is not None:
        await control.run(lambda leader: _sleep(leader, kinds), None)
    try:
        return await rest
    except Exception:
        if control is not None:
            await control.run(lambda leader: _wake(leader, kinds), None, "update")
        raise


def _sleep(leader: Leader, kinds: frozenset[str]) -> None:
    fall_asleep(leader, kinds)
    if WEIGHTS in kinds:
        engine: Any = leader.engine
        engine.fall_asleep()


def _wake(leader: Leader, kinds: frozenset[str]) -> None:
    if WEIGHTS in kinds:
        engine: Any = leader.engine
        engine.asleep = False
    wake_up(leader, kinds, WEIGHTS)
    if not leader.released & {WEIGHTS, CACHE}:
        leader.released = frozenset()  # vLLM then schedules again, regardless of the tags


def _control(request: Request) -> Control | None:
    control: Control | None = getattr(request.app.state, "deltachain", None)
    return control if control is not None and control.leader is not None else None
