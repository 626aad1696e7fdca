"""A server that gives memory back, and what must be true before it is ready again.

SGLang releases its cache, captured graphs and weights, all or some of them, and resumes them. What
weights hold once they are resumed is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fastapi import HTTPException

from deltachain.control.server.auth import Control
from deltachain.control.server.sleep import fall_asleep, wake_up
from deltachain.errors import DeltaChainError
from deltachain_sglang import compat


async def on_sleep(
    original: Callable[..., Any],
    server: Any,  # noqa: ANN401 - SGLang's TokenizerManager
    obj: Any,  # noqa: ANN401 - SGLang's request
    request: Any = None,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Around ``release_memory_occupation`` in the server: from here on, it is not ready."""
    control = _control()
    if control is not None:
        kinds = compat.kinds(obj.tags)
        await control.run(lambda leader: fall_asleep(leader, kinds), None)
    return await original(server, obj, request)


async def on_wake(
    original: Callable[..., Any],
    server: Any,  # noqa: ANN401
    obj: Any,  # noqa: ANN401
    request: Any = None,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Around ``resume_memory_occupation``: weights are proven, or healed, before it is ready."""
    found = await original(server, obj, request)
    control = _control()
    if control is not None:
        kinds = compat.kinds(obj.tags)
        with suppress(DeltaChainError, HTTPException):  # what its status then tells
            await control.run(lambda leader: wake_up(leader, kinds, compat.WEIGHTS), None, "update")
    return found


def _control() -> Control | None:
    control: Control | None = getattr(compat.app().state, "deltachain", None)
    return control if control is not None and control.leader is not None else None
