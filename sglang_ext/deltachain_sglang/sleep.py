"""A server that gives memory back, and what must be true before it is ready again.

SGLang releases its cache, captured graphs and weights, all or some of them, and resumes them. What
weights hold once they are resumed is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fastapi import HTTPException

from deltachain.control.gate import Control
from deltachain.errors import DeltaChainError
from deltachain.subscribe.leader import Leader
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
        await control.run(lambda leader: _sleep(leader, kinds), None)
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
            await control.run(lambda leader: _wake(leader, kinds), None, "update")
    return found


def _sleep(leader: Leader, kinds: frozenset[str]) -> None:
    with leader.subscriber.alone():  # a swap that is under way ends first
        leader.released |= kinds


def _wake(leader: Leader, kinds: frozenset[str]) -> None:
    try:
        if compat.WEIGHTS in kinds & leader.released:
            leader.scrub()
    finally:
        leader.released -= kinds


def _control() -> Control | None:
    control: Control | None = getattr(compat.app().state, "deltachain", None)
    return control if control is not None and control.leader is not None else None
