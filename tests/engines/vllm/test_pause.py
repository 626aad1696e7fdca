"""How a server is paused: all of vLLM's pause but its sleep, and vLLM's own where it differs."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.renderers.base import BaseRenderer
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient

from deltachain_vllm.compat import pause

pytestmark = pytest.mark.engine


class Client:
    def __init__(self, *, known: bool) -> None:
        self.asked: list[Any] = []
        if known:
            self.engine_core = SimpleNamespace(pause_scheduler_async=self._scheduler)
            self.renderer = SimpleNamespace(clear_mm_cache_async=self._clear)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.asked.append(("pause_generation", mode, clear_cache))

    async def _scheduler(self, mode: str, clear_cache: bool) -> None:
        self.asked.append(("scheduler", mode, clear_cache))

    async def _clear(self) -> None:
        self.asked.append("clear")


def test_this_vllm_has_what_a_pause_asks_for() -> None:
    assert inspect.iscoroutinefunction(BaseRenderer.clear_mm_cache_async)
    asked = list(inspect.signature(AsyncMPClient.pause_scheduler_async).parameters)
    assert asked == ["self", "mode", "clear_cache"]
    body = inspect.getsource(AsyncLLM.pause_generation)
    assert body.count("await ") == 3  # these two and the sleep: nothing that we would miss
    assert "await asyncio.sleep(0.02)" in body


def test_the_scheduler_is_paused_after_the_front_ends_cache_is_cleared() -> None:
    client = Client(known=True)
    asyncio.run(pause(client, "keep", clear=True))
    assert client.asked == ["clear", ("scheduler", "keep", True)]


def test_caches_that_are_kept_are_not_cleared() -> None:
    client = Client(known=True)
    asyncio.run(pause(client, "wait", clear=False))
    assert client.asked == [("scheduler", "wait", False)]


def test_an_unknown_client_is_paused_in_its_own_way() -> None:
    client = Client(known=False)
    asyncio.run(pause(client, "abort", clear=True))
    assert client.asked == [("pause_generation", "abort", True)]
