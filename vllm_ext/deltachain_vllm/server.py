"""A vLLM server as an engine: its asynchronous client, called from the leader's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Final, TypeVar

import msgspec
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.protocol import EngineClient

from deltachain.errors import ApplyError, PartialApplyError
from deltachain.replica.engine import run_on
from deltachain.replica.messages import (
    LastSwapRequest,
    RankReply,
    RankRequest,
    StatusReply,
    SwapRequest,
    decode_reply,
    encode,
)
from deltachain.replica.settings import ReplicaSettings
from deltachain.replica.target import pause_mode
from deltachain_vllm import BACKEND, HANDLE
from deltachain_vllm.compat import check_version, mode_in_doubt, pause
from deltachain_vllm.extension import check_extension
from deltachain_vllm.start_check import PAUSES

OPTION: Final = "--worker-extension-cls"
"""Option that names the extension of a server's workers."""

_T = TypeVar("_T")


class VllmEngine:
    """A vLLM server as :class:`deltachain.replica.engine.Engine`; not for the loop's own thread.

    Args:
        client: Engine client of the server.
        loop: Event loop of the client.
        settings: Settings of the replica.

    Raises:
        ConfigError: deltachain does not support the server's configuration.
        EngineVersionError: This vLLM was not tested.

    Attributes:
        asleep: Whether the weights are released.
        software: Name and version of the engine.
    """

    def __init__(
        self, client: EngineClient, loop: asyncio.AbstractEventLoop, settings: ReplicaSettings
    ) -> None:
        self.software: Final = f"vllm/{check_version()}"
        self.mode = pause_mode(settings.pause, PAUSES)
        check_extension(client.vllm_config, OPTION)
        transfer = client.vllm_config.weight_transfer_config
        self._in_session = transfer is not None and transfer.backend == BACKEND
        self._client = client
        self._loop = loop
        self.asleep = False
        self._clear, self._doubted = not settings.keep_cache, False

    def call(self, request: RankRequest) -> Sequence[RankReply]:
        """Send a request to every worker, a swap in vLLM's own update session if configured.

        Raises:
            PartialApplyError: Another client has an open update session; nothing was written.
            ApplyError: The server has released its weights, or does not reply.
        """
        if self.asleep:
            raise ApplyError("the engine has released its weights", hint="POST /wake_up wakes it")
        if isinstance(request, SwapRequest) and self._in_session:
            texts = self._wait(self._swap(request))
        else:
            texts = self._wait(self._send(request))
        replies = [decode_reply(text) for text in texts]
        if any(isinstance(reply, StatusReply) and reply.in_update_session for reply in replies):
            raise PartialApplyError(
                "somebody else has opened an update session in this server",
                hint="POST /finish_weight_update ends it",
            )
        return replies

    def is_dead(self) -> bool:
        """Return whether the engine has ended, as the server's own ``/health`` does."""
        return bool(self._client.errored)

    def is_paused(self) -> bool:
        """Return whether the scheduler is paused."""
        return bool(self._wait(self._client.is_paused()))

    def pause(self, *, in_doubt: bool = False) -> None:
        """Pause the scheduler in the replica's mode; drop cached prefixes, unless they are kept."""
        self._doubted |= in_doubt
        mode = mode_in_doubt(self.mode) if in_doubt else self.mode
        self._wait(pause(self._client, mode, clear=self._clear or self._doubted))

    def resume(self) -> None:
        """Resume the scheduler."""
        self._wait(self._client.resume_generation())

    def name_version(self, version: int) -> None:
        """Label tokens with this version; drop older cached prefixes, unless they are kept."""
        self._wait(self._name(version))

    def fall_asleep(self) -> None:
        """Refuse calls from here on, and wait for threads that still read weights."""
        self.asleep = True
        self._wait(self._client.collective_rpc("deltachain_settle"))

    async def _send(self, request: RankRequest) -> Sequence[str]:
        texts: Sequence[str] = await self._client.collective_rpc(HANDLE, args=(encode(request),))
        return texts

    async def _swap(self, request: SwapRequest) -> Sequence[str]:
        try:
            await self._client.start_weight_update()
        except Exception as exc:
            raise PartialApplyError(f"vLLM opened no update session: {exc}") from exc
        fields = msgspec.structs.asdict(request)
        await self._client.update_weights(WeightTransferUpdateRequest(update_info=fields))
        # Separate calls would each add a round trip in which nothing is generated.
        last = LastSwapRequest(leader=request.leader, sequence=request.sequence)
        texts, _ = await asyncio.gather(self._send(last), self._client.finish_weight_update())
        return texts

    async def _name(self, version: int) -> None:
        done, _ = await asyncio.gather(
            self._reset_cache(), self._client.update_weight_version(str(version))
        )
        if not done:
            raise ApplyError("the prefix cache could not be reset", version=version)
        self._doubted = False

    async def _reset_cache(self) -> bool:
        if not (self._clear or self._doubted):
            return True
        done: bool = await self._client.reset_prefix_cache(
            reset_running_requests=True, reset_connector=True
        )
        return done

    def _wait(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return run_on(self._loop, coroutine)
