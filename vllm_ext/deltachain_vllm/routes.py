"""Routes ``/v1/deltachain/*`` of a vLLM server, and probes that need no key."""

import asyncio
import os
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import msgspec
from fastapi import FastAPI, HTTPException, Request
from fastapi.routing import APIRoute

from deltachain.control import routes as control_routes
from deltachain.control import server as control_server
from deltachain.control.access import LOOPBACK
from deltachain.control.schemas import VersionRequest
from deltachain.errors import ConfigError, DeltaChainError
from deltachain.replica.leader import Leader
from deltachain.replica.settings import ReplicaSettings

from . import speak
from .compat import check_layout, check_version, front_end_of, shares_experts

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

    from .servers import Servers

# vLLM's routes for sleep are wrapped, as endpoint plugins may do. At level 1 vLLM
# moves weights to the host and drops its cache, at level 2 it drops both; at level 0 it only stops
# generating. The content of weights after a wake-up is unknown.


WEIGHTS: Final = "weights"
CACHE: Final = "kv_cache"
SCHEDULING: Final = "scheduling"  # vLLM's tag for its scheduler

Endpoint = Callable[..., Awaitable[Any]]


def attach_own(app: FastAPI) -> None:
    """Wrap vLLM's routes for sleep, and for weights of a trainer, where the server has them.

    vLLM 0.31 and earlier would find its own first.
    """
    for at, route in enumerate([*app.routes]):
        if isinstance(route, APIRoute) and route.path in WRAPPED:
            endpoint = WRAPPED[route.path](route.endpoint)
            app.add_api_route(route.path, endpoint, methods=sorted(route.methods or ()))
            app.router.routes[at] = app.router.routes.pop()


def _sleeping(original: Endpoint) -> Endpoint:
    """Become unready, then let vLLM do the rest; restore readiness if that fails."""

    @wraps(original)
    async def sleep(raw_request: Request, **asked: Any) -> Any:
        kinds = frozenset({CACHE})
        if raw_request.url.path.endswith("/sleep"):  # else only the cache is released
            # vLLM 0.31 and earlier read the level from the request themselves.
            level = asked.get("level", raw_request.query_params.get("level", 1))
            kinds = frozenset({SCHEDULING} if str(level) == "0" else {WEIGHTS, CACHE})
        control = control_server.leading(raw_request.app)
        if control is not None:
            await control.run(lambda leader: _sleep(leader, kinds), None)
        try:
            return await original(raw_request, **asked)
        except Exception:
            if control is not None:
                await control.run(lambda leader: _wake(leader, kinds), None, "update")
            raise

    return sleep


def _waking(original: Endpoint) -> Endpoint:
    @wraps(original)
    async def wake(raw_request: Request) -> Any:
        found = await original(raw_request)
        control = control_server.leading(raw_request.app)
        if control is not None:
            # Without tags everything wakes. The last tag also wakes scheduling.
            tags = raw_request.query_params.getlist("tags")
            kinds = frozenset(tags or (WEIGHTS, CACHE, SCHEDULING))
            with suppress(DeltaChainError, HTTPException):  # the error is part of its status
                await control.run(lambda leader: _wake(leader, kinds), None, "update")
        return found

    return wake


def _updating(original: Endpoint) -> Endpoint:
    """Update to a version that a trainer names; see :mod:`deltachain_vllm.trainer`."""

    @wraps(original)
    async def update_weights(raw_request: Request, **asked: Any) -> Any:
        try:
            named = msgspec.convert(asked["update_info"], VersionRequest)
        except msgspec.ValidationError:  # of another backend, which refuses it itself
            return await original(raw_request, **asked)
        return await control_routes.update(
            control_server.control_of(raw_request), named, raw_request
        )

    return update_weights


def _sleep(leader: Leader, kinds: frozenset[str]) -> None:
    control_server.fall_asleep(leader, kinds)
    if WEIGHTS in kinds:
        engine: Any = leader.engine
        engine.fall_asleep()


def _wake(leader: Leader, kinds: frozenset[str]) -> None:
    if WEIGHTS in kinds:
        engine: Any = leader.engine
        engine.asleep = False
    control_server.wake_up(leader, kinds, WEIGHTS)
    if not leader.released & {WEIGHTS, CACHE}:
        leader.released = frozenset()  # vLLM then schedules again, regardless of the tags


PREFIX: Final = "/v1/deltachain"

WRAPPED: Final[Mapping[str, Callable[[Endpoint], Endpoint]]] = {
    "/sleep": _sleeping,
    "/release_kv_cache_memory": _sleeping,
    "/wake_up": _waking,
    "/update_weights": _updating,
}
"""Paths of vLLM's routes for sleep and for weights of a trainer, and what they are wrapped in."""


class EndpointPlugin:
    """Entry point of ``vllm.endpoint_plugins``; vLLM creates it in the API server."""

    name: Final = "deltachain_http"
    required_tasks: Final = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; called once, after the server's own routes are in its ``app``."""
        self._app = app
        app.include_router(control_routes.router, prefix=PREFIX)
        app.include_router(control_routes.probes)
        attach_own(app)
        control_server.leave_at_end(app)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Catch up before the server accepts requests; called once, when the engine is up."""
        speak()
        number, count = front_end_of(engine_client)
        follows = "DELTACHAIN_URL" in os.environ
        ours = (route.path for route in control_routes.probes.routes if isinstance(route, APIRoute))
        passed = [f"{PREFIX}/{{rest:path}}", *ours]
        if number > 0 and follows:
            from .front_ends import first_front_end, pass_on

            pass_on(self._app, [*passed, *WRAPPED], await first_front_end())
            return
        loop = asyncio.get_running_loop()
        is_open = getattr(args, "host", None) in LOOPBACK
        servers = None
        if follows and shares_experts(getattr(engine_client, "vllm_config", None)):
            from .servers import meet

            servers = await meet(engine_client)
        if servers is not None and servers.number > 0:
            from .front_ends import pass_on

            settings = ReplicaSettings.of(os.environ)
            await servers.obey(_engine(engine_client, loop, settings)[0])
            pass_on(self._app, [*passed, "/update_weights"], servers.leader(is_open=is_open))
        else:
            keys = getattr(args, "api_key", None) or os.environ.get("VLLM_API_KEY") or ()
            has_key = any([keys] if isinstance(keys, str) else keys)  # vLLM ignores empty keys
            state.deltachain = await control_server.lead(
                lambda settings: _engine(engine_client, loop, settings, servers),
                os.environ,
                is_open=is_open,
                is_guarded=has_key,
                address=f"{getattr(args, 'host', None) or ''}:{getattr(args, 'port', '')}",
            )
            control_server.join_registry(state.deltachain)
            if servers is not None:
                servers.answer(self._app, loop)
        if count > 1:
            from .front_ends import answer

            state.deltachain_front = await answer(self._app)


def _engine(
    client: "EngineClient | None",
    loop: asyncio.AbstractEventLoop,
    settings: ReplicaSettings | None,
    servers: "Servers | None" = None,
) -> control_server.LedEngine:
    if client is None or settings is None:
        raise ConfigError("this server has no engine of its own")
    check_layout(client.vllm_config)
    check_version()
    from .engine import VllmEngine
    from .model import checkpoint_of

    engine: Any = VllmEngine(client, loop, settings)
    engine = servers.joint(engine) if servers is not None else engine
    return engine, checkpoint_of(client.vllm_config)
