"""Calls of an engine that lives on an event loop, from the thread of a leader."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from deltachain.errors import ApplyError, ConfigError

_T = TypeVar("_T")


def run_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine of an engine on its event loop, and wait for the result.

    Args:
        loop: Loop of the engine, which runs in another thread, or in none.
        coroutine: Coroutine to run.

    Raises:
        ConfigError: The loop runs in this thread, which would wait for itself.
        ApplyError: The engine raised, or has ended.
    """
    if _is_running_here(loop):
        coroutine.close()
        raise ConfigError(
            "this thread runs the event loop of the engine, and cannot wait for it",
            hint="call it in another thread: await asyncio.to_thread(subscriber.update)",
        )
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()
    except ApplyError:
        raise
    except Exception as exc:  # engines raise plain exceptions, also when they are dead
        raise ApplyError(f"the engine did not answer: {exc}") from exc


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
