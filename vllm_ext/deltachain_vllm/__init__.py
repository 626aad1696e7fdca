"""The vLLM side of deltachain: what vLLM's plugin entry points resolve to.

vLLM discovers both names below; neither hooks anything into it. This module imports nothing but
the standard library, because vLLM loads it in every process it starts.
"""

from __future__ import annotations

from typing import Final

__all__ = ["EndpointPlugin", "register"]


def register() -> None:
    """Entry point of ``vllm.general_plugins``; registers nothing.

    vLLM calls it in the API server, the engine core and every worker, possibly more than once in
    one process, and does not catch what it raises: it must stay cheap, idempotent and silent.
    """


class EndpointPlugin:
    """Entry point of ``vllm.endpoint_plugins``; attaches no routes.

    vLLM instantiates it without arguments in the API server, and only if ``VLLM_PLUGINS`` names
    it. The shape is vLLM's ``EndpointPlugin`` protocol, spelled without importing vLLM.
    """

    name: Final = "deltachain_http"
    required_tasks: Final = None  # eligible whatever the server can do

    def attach_router(self, app: object) -> None:
        """Called once, after the server's own routes are on its FastAPI ``app``."""

    async def init_state(self, engine_client: object, state: object, args: object) -> None:
        """Called once when the engine is up; ``engine_client`` is None on a render server."""
