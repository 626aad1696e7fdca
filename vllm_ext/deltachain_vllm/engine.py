"""Engines of vLLM: a server, called from the leader's thread, and an engine in this process."""

import asyncio
import os
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.protocol import EngineClient
from vllm.v1.engine.async_llm import AsyncLLM

from deltachain.errors import ApplyError, ConfigError, PartialApplyError
from deltachain.replica import messages as wire
from deltachain.replica.engine import age, pause_mode, run_on
from deltachain.replica.leader import Leader
from deltachain.replica.settings import ReplicaSettings
from deltachain.replica.target import ReplicaTarget
from deltachain.subscribe import SubscribeConfig, Subscriber

from . import BACKEND, HANDLE, IN_PLACE
from .cache_salts import OLDEST, check_salted
from .compat import call_engines, call_workers, check_experts, check_layout, check_version, pause
from .extension import check_extension
from .start_check import PAUSES
from .table import TABLE

if TYPE_CHECKING:
    from vllm import LLM


_T = TypeVar("_T")

_QUICK: Final = (wire.StatusRequest, wire.FetchRequest, wire.PollRequest)
"""Requests that a worker answers at once."""

STEP_S: Final = float(os.environ.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS") or 300)
"""Seconds after which vLLM takes a worker that has not answered for dead."""


class VllmEngine:
    """A vLLM server as an engine; its methods are not for the thread of its event loop.

    ``asleep`` is set while its weights are released.
    """

    def __init__(
        self, client: EngineClient, loop: asyncio.AbstractEventLoop, settings: ReplicaSettings
    ) -> None:
        self.mode = pause_mode(settings.pause, PAUSES)
        self.software: Final = f"vllm/{check_version(self.mode)}"
        check_extension(client.vllm_config, "--worker-extension-cls")
        transfer = client.vllm_config.weight_transfer_config
        self._in_session = transfer is not None and transfer.backend == BACKEND
        self._client = client
        self._loop = loop
        self.asleep = False
        if self.mode == IN_PLACE:
            check_salted()
        self._clear, self._doubted = self.mode != IN_PLACE, False

    def call(self, request: wire.RankRequest) -> Sequence[wire.RankReply]:
        """Send a request to every worker, a swap in vLLM's own update session if configured."""
        if self.asleep:
            raise ApplyError("the engine has released its weights", hint="POST /wake_up wakes it")
        in_session = self._in_session and not request.of_draft
        if isinstance(request, wire.SwapRequest) and in_session:
            texts = self._wait(self._swap(request))
        else:
            texts = self._wait(self._send(request))
        replies = [wire.decode_reply(text) for text in texts]
        if any(
            isinstance(reply, wire.StatusReply) and reply.in_update_session for reply in replies
        ):
            raise PartialApplyError(
                "somebody else has opened an update session in this server",
                hint="POST /finish_weight_update ends it",
            )
        return replies

    def is_dead(self) -> bool:
        return bool(self._client.errored)

    def is_paused(self) -> bool:
        return bool(self._wait(self._client.is_paused()))

    def pause(self, *, in_doubt: bool = False) -> None:
        self._doubted |= in_doubt
        # Untrusted weights must generate no more tokens.
        keeps = self.mode == IN_PLACE or (in_doubt and self.mode == "wait")
        mode = "keep" if keeps else self.mode
        self._wait(pause(self._client, mode, clear=self._clear or self._doubted))

    def resume(self) -> None:
        self._wait(self._client.resume_generation())

    def name_version(self, version: int) -> None:
        self._wait(self._name(version))

    def oldest(self) -> str:
        if self.mode != IN_PLACE:
            return ""
        return min(self._wait(call_engines(self._client, OLDEST)), key=age)

    def fall_asleep(self) -> None:
        """Refuse calls from here on, and wait for threads that still read weights."""
        self.asleep = True
        self._wait(self._client.collective_rpc("deltachain_settle"))

    def end(self) -> None:
        """End the engine, and the server with it."""
        self._loop.call_soon_threadsafe(self._client.shutdown)

    async def _send(self, request: wire.RankRequest) -> Sequence[str]:
        limit_s = STEP_S if isinstance(request, _QUICK) else None
        return await call_workers(self._client, HANDLE, wire.encode(request), limit_s=limit_s)

    async def _swap(self, request: wire.SwapRequest) -> Sequence[str]:
        try:
            await self._client.start_weight_update()
        except Exception as exc:
            raise PartialApplyError(f"vLLM opened no update session: {exc}") from exc
        told = WeightTransferUpdateRequest(update_info=msgspec.structs.asdict(request))
        await AsyncLLM.update_weights(self._client, told)  # a subclass's own may wait for this swap
        # Separate calls would each add a round trip in which nothing is generated.
        last = wire.LastSwapRequest(leader=request.leader, sequence=request.sequence)
        texts, _ = await asyncio.gather(self._send(last), self._client.finish_weight_update())
        return texts

    async def _name(self, version: int) -> None:
        naming = self._client.update_weight_version(str(version))
        if not (self._clear or self._doubted):
            await naming
            return
        reset = self._client.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        done, _ = await asyncio.gather(reset, naming)
        if not done:
            raise ApplyError("the prefix cache could not be reset", version=version)
        self._doubted = False

    def _wait(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return run_on(self._loop, coroutine)


ARGUMENT: Final = "worker_extension_cls"  # argument that names the extension of an engine's workers


class OfflineEngine:
    """An offline ``LLM`` as an engine; idle between its calls, where nothing is generated."""

    software = "vllm"

    def __init__(self, llm: "LLM") -> None:
        self.llm = llm

    def call(self, request: wire.RankRequest) -> Sequence[wire.RankReply]:
        try:
            texts = self.llm.collective_rpc(HANDLE, args=(wire.encode(request),))
        except Exception as exc:
            raise ApplyError(f"the engine did not answer {wire.name_of(request)!r}: {exc}") from exc
        return [wire.decode_reply(text) for text in texts]

    def is_dead(self) -> bool:
        return False

    def is_paused(self) -> bool:
        return False

    def pause(self, *, in_doubt: bool = False) -> None: ...

    def resume(self) -> None: ...

    def oldest(self) -> str:
        return ""

    def name_version(self, version: int) -> None:
        if not self.llm.reset_prefix_cache():
            raise ApplyError("the prefix cache could not be reset", version=version)
        self.llm.llm_engine.set_weight_version(str(version))


def subscribe(llm: "LLM | EngineClient", config: SubscribeConfig | str) -> Subscriber:
    """Return a subscriber whose target is an engine in this process.

    >>> llm = LLM(model, worker_extension_cls="deltachain_vllm.WorkerExtension")  # doctest: +SKIP
    >>> deltachain_vllm.subscribe(llm, "s3://bucket/run").update()                # doctest: +SKIP

    An ``AsyncLLM`` goes on generating, and is paused for swaps as a server is. Call this in its
    event loop, and the methods of the subscriber in other threads.

    Args:
        llm: ``LLM``, between its calls, or ``AsyncLLM``.
        config: Settings, or the URL alone.

    Raises:
        ConfigError: The engine was created without the extension, is none of vLLM's, or has no
            event loop yet; or a ``DELTACHAIN_*`` variable is invalid.
    """
    settings = ReplicaSettings.in_process(config, os.environ)
    target = ReplicaTarget(_engine_of(llm, settings), settings.subscribe.url, settings.spool)
    return Subscriber(settings.subscribe, target)


def follow(llm: EngineClient, config: SubscribeConfig | str) -> Leader:
    """Let an ``AsyncLLM`` follow a chain in the background, while it generates.

    >>> leader = deltachain_vllm.follow(llm, "s3://bucket/run")  # doctest: +SKIP
    >>> leader.status().version, leader.stop()                   # doctest: +SKIP

    Call this in its event loop, and ``stop`` and other methods that wait for it in other threads.

    Raises:
        ConfigError: As :func:`subscribe`; or it is an ``LLM``, which one thread calls at a time.
    """
    settings = ReplicaSettings.in_process(config, os.environ)
    engine = _engine_of(llm, settings)
    if isinstance(engine, OfflineEngine):
        raise ConfigError(
            "an LLM is called by one thread at a time, so none can update it in the background",
            hint="call subscribe(llm, url).update() between its calls, or make an AsyncLLM",
        )
    return Leader(settings, engine).begin()


def _engine_of(
    llm: "LLM | EngineClient", settings: ReplicaSettings
) -> "OfflineEngine | VllmEngine":
    TABLE.tell(check_version())
    if isinstance(llm, EngineClient):
        check_extension(llm.vllm_config, ARGUMENT)
        check_layout(llm.vllm_config, in_process=True)
        return VllmEngine(llm, _loop_of(llm), settings)
    if not hasattr(llm, "llm_engine"):
        raise ConfigError(
            f"{type(llm).__name__} is no engine to subscribe", hint="pass an LLM or an AsyncLLM"
        )
    check_extension(llm.llm_engine.vllm_config, ARGUMENT)
    check_experts(llm.llm_engine.vllm_config)
    return OfflineEngine(llm)


def _loop_of(client: Any) -> asyncio.AbstractEventLoop:
    handler = getattr(client, "output_handler", None)
    if handler is not None:
        loop: asyncio.AbstractEventLoop = handler.get_loop()
        return loop
    try:
        return asyncio.get_running_loop()
    except RuntimeError as exc:
        raise ConfigError(
            "the event loop of this engine is not known", hint="call subscribe() in that loop"
        ) from exc
