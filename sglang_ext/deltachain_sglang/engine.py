"""Engines of SGLang: a server, called from the leader's thread, and one in this process."""

import asyncio
import os
import secrets
import time
from collections.abc import Coroutine, Sequence
from threading import Lock
from typing import Any, Final, TypeVar

import msgspec
from typing_extensions import override

from deltachain.errors import ApplyError, ConfigError, PartialApplyError, UnsupportedEngineError
from deltachain.replica.engine import age, pause_mode, run_on
from deltachain.replica.leader import Leader
from deltachain.replica.messages import AnyRequest, RankReply, SwapRequest, encode
from deltachain.replica.settings import ReplicaSettings
from deltachain.replica.target import ReplicaTarget
from deltachain.subscribe import SubscribeConfig, Subscriber

from . import SCHEME, compat
from .ranks import BUSY, COLLECT, SchedulerReply, SchedulerRequest, decode_scheduler_reply
from .start_check import PAUSES
from .table import IN_PLACE, TABLE

BUSY_S: Final = 5.0
"""Timeout in seconds of a swap for aborted requests, which end with the schedulers' next step."""

BUSY_POLL_S: Final = 0.005

_TURN: Final = Lock()  # held until the replies of all pipeline stages are collected

_T = TypeVar("_T")


class SglangEngine:
    """An SGLang server as an engine; its methods are not for the thread of its event loop."""

    def __init__(
        self, server: Any, loop: asyncio.AbstractEventLoop, settings: ReplicaSettings
    ) -> None:
        self.mode = pause_mode(settings.pause, PAUSES)
        self.software: Final = f"sglang/{compat.check_version(self.mode)}"
        compat.check_layout(self.mode)
        self._server = compat.Server(server)
        self._is_staged = compat.stages() > 1
        self._loop = loop
        self._doubted = False
        self._process, self._swaps = secrets.token_hex(8), 0
        self._oldest = ""  # of the last reply

    def call(self, request: AnyRequest) -> Sequence[RankReply]:
        """Send a request to every rank; flush or salt caches with a swap."""
        swaps = isinstance(request, SwapRequest) and not request.of_draft
        self._swaps += swaps
        flush = swaps and (self.mode != IN_PLACE or self._doubted)
        salt = f"{self._process}.{self._swaps}" if swaps and not flush else ""
        asked = SchedulerRequest(request=request, flush=flush, salt=salt)
        if flush and self._is_staged:  # one stage swaps before another could reply that it is busy
            self._ask(msgspec.structs.replace(asked, ask=True))
        return self._ask(asked)

    def oldest(self) -> str:
        return self._oldest if self.mode == IN_PLACE else ""

    def _ask(self, asked: SchedulerRequest) -> Sequence[RankReply]:
        """Return the replies of all ranks.

        While one data-parallel engine is busy, the others are asked again too: a rank that has
        written does nothing then.
        """
        until = time.monotonic() + BUSY_S
        while True:
            with _TURN:
                engines = self._send(encode(asked))
                if self._is_staged:
                    engines = self._send(COLLECT)
            statuses = {engine.status for engine in engines}
            if "asleep" in statuses:
                raise ApplyError(
                    "the engine has released its weights",
                    hint="POST /resume_memory_occupation wakes it",
                )
            if "busy" in statuses and asked.ask and time.monotonic() > until:
                raise PartialApplyError(BUSY)
            if "busy" not in statuses or time.monotonic() > until:
                # A refusal names none.
                self._oldest = min((one.oldest for one in engines), key=age) or self._oldest
                replies = [reply for engine in engines for reply in engine.replies]
                return sorted(replies, key=lambda reply: reply.rank)
            time.sleep(BUSY_POLL_S)

    def _send(self, text: str) -> list[SchedulerReply]:
        texts = self._wait(self._server.check_weights(SCHEME + text))
        return [decode_scheduler_reply(text) for text in texts]

    def is_dead(self) -> bool:
        return self._server.is_dead()

    def is_paused(self) -> bool:
        return self._server.is_paused()

    def pause(self, *, in_doubt: bool = False) -> None:
        """Pause in the mode of the replica; drop a cache that may be wrong."""
        self._doubted |= in_doubt
        keeps = self.mode == IN_PLACE and self._doubted
        self._wait(self._server.pause("retract" if keeps else self.mode))

    def resume(self) -> None:
        self._wait(self._server.resume())

    def name_version(self, version: int) -> None:
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
        EngineVersionError: This SGLang lacks names that are needed.
    """
    settings = ReplicaSettings.in_process(config, os.environ)
    replica = _engine_of(engine, settings)
    target = ReplicaTarget(replica, settings.subscribe.url, settings.spool)
    return Subscriber(settings.subscribe, target)


def follow(engine: Any, config: SubscribeConfig | str) -> Leader:
    """Let an ``Engine`` follow a chain in the background, while it generates.

    >>> leader = deltachain_sglang.follow(engine, "s3://bucket/run")  # doctest: +SKIP
    >>> leader.status().version, leader.stop()                        # doctest: +SKIP

    The engine was created in a running event loop. Call ``stop`` and other methods that wait for
    it in other threads.

    Raises:
        ConfigError: As :func:`subscribe`; or no event loop was running.
    """
    settings = ReplicaSettings.in_process(config, os.environ)
    replica = _engine_of(engine, settings)
    if not engine.loop.is_running():
        raise ConfigError(
            "the event loop of this engine runs only in its calls, so nothing can update it in the "
            "background",
            hint="create the engine in a running event loop, or call subscribe(engine, "
            "url).update() between its calls",
        )
    return Leader(settings, replica).begin()


def _engine_of(engine: Any, settings: ReplicaSettings) -> InProcessEngine:
    TABLE.tell(compat.check_version())
    if compat.front_ends() > 1:
        raise UnsupportedEngineError(
            f"this engine has {compat.front_ends()} tokenizer workers",
            hint="create it with tokenizer_worker_num=1",
        )
    return InProcessEngine(engine.tokenizer_manager, engine.loop, settings)
