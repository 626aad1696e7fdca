"""Engines of SGLang: a server, called from the leader's thread, and one in this process."""

import asyncio
import os
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Final, TypeVar

from typing_extensions import override

from deltachain.errors import ApplyError, UnsupportedEngineError
from deltachain.replica.engine import pause_mode, run_on
from deltachain.replica.messages import AnyRequest, RankReply, SwapRequest, encode
from deltachain.replica.settings import ReplicaSettings
from deltachain.replica.swap import ReplicaTarget
from deltachain.subscribe import SubscribeConfig, Subscriber

from . import SCHEME, compat
from .ranks import SchedulerRequest, decode_scheduler_reply
from .start_check import PAUSES

BUSY_S: Final = 5.0
"""Timeout in seconds of a swap for aborted requests, which end with the schedulers' next step."""

BUSY_POLL_S: Final = 0.005

_T = TypeVar("_T")


class SglangEngine:
    """An SGLang server as an engine; its methods are not for the thread of its event loop."""

    def __init__(
        self, server: Any, loop: asyncio.AbstractEventLoop, settings: ReplicaSettings
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

        While one data-parallel engine is busy, the others are asked again too: a rank that has
        written does nothing then.
        """
        flush = isinstance(request, SwapRequest) and (self._flush or self._doubted)
        action = SCHEME + encode(SchedulerRequest(request=request, flush=flush))
        until = time.monotonic() + BUSY_S
        while True:
            texts = self._wait(self._server.check_weights(action))
            engines = [decode_scheduler_reply(text) for text in texts]
            statuses = {engine.status for engine in engines}
            if "asleep" in statuses:
                raise ApplyError(
                    "the engine has released its weights",
                    hint="POST /resume_memory_occupation wakes it",
                )
            if "busy" not in statuses or time.monotonic() > until:
                replies = [reply for engine in engines for reply in engine.replies]
                return sorted(replies, key=lambda reply: reply.rank)
            time.sleep(BUSY_POLL_S)

    def is_dead(self) -> bool:
        return self._server.is_dead()

    def is_paused(self) -> bool:
        return self._server.is_paused()

    def pause(self, *, in_doubt: bool = False) -> None:
        """Pause in the mode of the replica; drop a cache that may be wrong."""
        self._doubted |= in_doubt
        keeps = self.mode == "in_place" and self._doubted
        self._wait(self._server.pause("retract" if keeps else self.mode))

    def resume(self) -> None:
        self._wait(self._server.resume())

    def name_version(self, version: int) -> None:
        """Label tokens with this version; the swap has flushed the caches of older ones."""
        self._wait(self._server.name(str(version)))
        self._doubted = False

    def _wait(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return run_on(self._loop, coroutine)


class InProcessEngine(SglangEngine):
    """An ``Engine`` of SGLang, whose event loop may run only during its calls."""

    @override
    def _wait(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        if self._loop.is_running():
            return super()._wait(coroutine)
        return self._loop.run_until_complete(coroutine)


def subscribe(engine: Any, config: SubscribeConfig | str) -> Subscriber:
    """Return a subscriber whose target is an ``Engine`` in this process.

    >>> engine = sglang.Engine(model_path=model)                          # doctest: +SKIP
    >>> deltachain_sglang.subscribe(engine, "s3://bucket/run").update()   # doctest: +SKIP

    Call the subscriber between the calls of the engine, in the same thread; or, if the engine
    was created in a running event loop, in another thread.

    Args:
        engine: Engine, which SGLang started with the plugin ``deltachain``.
        config: Settings, or the URL alone.

    Raises:
        ConfigError: deltachain does not support the engine's configuration, or a
            ``DELTACHAIN_*`` variable is invalid.
        EngineVersionError: This SGLang was not tested.
    """
    settings = ReplicaSettings.in_process(config, os.environ)
    if compat.front_ends() > 1:
        raise UnsupportedEngineError(
            f"this engine has {compat.front_ends()} tokenizer workers",
            hint="create it with tokenizer_worker_num=1",
        )
    replica = InProcessEngine(engine.tokenizer_manager, engine.loop, settings)
    target = ReplicaTarget(replica, settings.subscribe.url, settings.spool)
    return Subscriber(settings.subscribe, target)
