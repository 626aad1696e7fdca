"""An SGLang server as an engine: its tokenizer manager, called from the leader's thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Final, TypeVar

from deltachain.errors import ApplyError, PartialApplyError
from deltachain.replica.engine import run_on
from deltachain.replica.messages import AnyRequest, RankReply, SwapRequest
from deltachain.replica.settings import ReplicaSettings
from deltachain.replica.target import pause_mode
from deltachain_sglang import SCHEME, compat
from deltachain_sglang.messages import SchedulerRequest, decode_scheduler_reply, encode_message
from deltachain_sglang.start_check import PAUSES

BUSY_S: Final = 5.0
"""Timeout in seconds of a swap for aborted requests, which end with the schedulers' next step."""

BUSY_POLL_S: Final = 0.005

_T = TypeVar("_T")


class SglangEngine:
    """An SGLang server as :class:`deltachain.replica.engine.Engine`; not for the loop's own thread.

    Args:
        server: ``TokenizerManager`` of SGLang.
        loop: Event loop of the ``TokenizerManager``.
        settings: Settings of the replica.

    Raises:
        ConfigError: deltachain does not support the server's configuration.
        EngineVersionError: This SGLang was not tested.

    Attributes:
        software: Name and version of the engine.
    """

    def __init__(
        self,
        server: Any,  # noqa: ANN401 - SGLang's
        loop: asyncio.AbstractEventLoop,
        settings: ReplicaSettings,
    ) -> None:
        self.software: Final = f"sglang/{compat.check_version()}"
        compat.check_layout(keep_cache=settings.keep_cache)
        self.mode = pause_mode(settings.pause, PAUSES)
        self._server = compat.Server(server)
        self._loop = loop
        self._flush = not settings.keep_cache and self.mode != "in_place"
        self._doubted = False

    def call(self, request: AnyRequest) -> Sequence[RankReply]:
        """Send a request to every rank, and return the replies; flush caches with a swap.

        Raises:
            PartialApplyError: Aborted requests do not end; nothing was written.
            ApplyError: The server has released its weights, or does not reply.
        """
        flush = isinstance(request, SwapRequest) and (self._flush or self._doubted)
        action = SCHEME + encode_message(SchedulerRequest(request=request, flush=flush))
        until = time.monotonic() + BUSY_S
        while True:
            found = decode_scheduler_reply(self._wait(self._server.check_weights(action)))
            if found.status == "answered":
                return found.replies
            if found.status == "asleep":
                raise ApplyError(
                    "the engine has released its weights",
                    hint="POST /resume_memory_occupation wakes it",
                )
            if time.monotonic() > until:
                raise PartialApplyError("requests are running that the pause did not end")
            time.sleep(BUSY_POLL_S)

    def is_dead(self) -> bool:
        """Return whether a process of the engine has ended, or the server is about to."""
        return self._server.is_dead()

    def is_paused(self) -> bool:
        """Return whether generation is paused, by any client."""
        return self._server.is_paused()

    def pause(self, *, in_doubt: bool = False) -> None:
        """Pause in the mode of the replica; drop a cache that may be wrong."""
        self._doubted |= in_doubt
        keeps = self.mode == "in_place" and self._doubted
        self._wait(self._server.pause("retract" if keeps else self.mode))

    def resume(self) -> None:
        """Resume generation."""
        self._wait(self._server.resume())

    def name_version(self, version: int) -> None:
        """Label tokens with this version; the swap has flushed the caches of older ones."""
        self._wait(self._server.name(str(version)))
        self._doubted = False

    def _wait(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return run_on(self._loop, coroutine)
