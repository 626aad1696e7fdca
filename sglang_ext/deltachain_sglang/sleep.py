"""Release and resumption of a server's memory, and the checks before it is ready again.

SGLang releases its cache, captured graphs and weights, all or some of them, and resumes them. The
content of weights after they are resumed is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fastapi import HTTPException

from deltachain.control.server import Control, fall_asleep, wake_up
from deltachain.errors import DeltaChainError
from deltachain_sglang import compat


async def on_sleep(
    original: Callable[..., Any],
    server: Any,  # noqa: ANN401 - SGLang's TokenizerManager
    obj: Any,  # noqa: ANN401 - SGLang's request
    request: Any = None,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Wrap ``release_memory_occupation`` in the server, which from then on is not ready."""
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
    """Wrap ``resume_memory_occupation``: prove or heal the weights before it is ready."""
    found = await original(server, obj, request)
    control = _control()
    if control is not None:
        kinds = compat.kinds(obj.tags)
        with suppress(DeltaChainError, HTTPException):  # the error is part of its status
            await control.run(lambda leader: wake_up(leader, kinds, compat.WEIGHTS), None, "update")
    return found


def _control() -> Control | None:
    control: Control | None = getattr(compat.app().state, "deltachain", None)
    return control if control is not None and control.leader is not None else None
