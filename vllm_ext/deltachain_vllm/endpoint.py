"""Routes ``/v1/deltachain/*`` of a vLLM server, and probes that need no key."""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI

from deltachain.control.routes import probes, router
from deltachain.control.server import (
    LOOPBACK,
    LedEngine,
    join_registry,
    lead,
    leave_at_end,
)
from deltachain.errors import ConfigError
from deltachain.replica.settings import ReplicaSettings
from deltachain_vllm import speak
from deltachain_vllm.compat import check_layout, check_version
from deltachain_vllm.sleep import attach_sleep

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

PREFIX: Final = "/v1/deltachain"


class EndpointPlugin:
    """Entry point of ``vllm.endpoint_plugins``; vLLM creates it in the API server."""

    name: Final = "deltachain_http"
    required_tasks: Final = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; called once, after the server's own routes are in its ``app``."""
        app.include_router(router, prefix=PREFIX)
        app.include_router(probes)
        attach_sleep(app)
        leave_at_end(app)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:  # noqa: ANN401
        """Catch up before the server accepts requests; called once, when the engine is up."""
        speak()
        loop = asyncio.get_running_loop()
        keys = getattr(args, "api_key", None) or os.environ.get("VLLM_API_KEY") or ()
        has_key = any([keys] if isinstance(keys, str) else keys)  # vLLM ignores empty keys
        state.deltachain = await lead(
            lambda settings: _engine(engine_client, loop, settings, args),
            os.environ,
            is_open=getattr(args, "host", None) in LOOPBACK,
            is_guarded=has_key,
            address=f"{getattr(args, 'host', None) or ''}:{getattr(args, 'port', '')}",
        )
        join_registry(state.deltachain)


def _engine(
    client: EngineClient | None,
    loop: asyncio.AbstractEventLoop,
    settings: ReplicaSettings,
    args: Namespace,
) -> LedEngine:
    if client is None:
        raise ConfigError("this server has no engine of its own")
    check_layout(client, args)
    check_version()
    from deltachain_vllm.model import checkpoint_of  # noqa: PLC0415
    from deltachain_vllm.server import VllmEngine  # noqa: PLC0415

    engine = VllmEngine(client, loop, settings)
    return LedEngine(engine, checkpoint_of(client.vllm_config))
