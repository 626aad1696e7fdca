"""A vLLM server as the leader of its ranks: the engine client, asked from the leader's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.protocol import EngineClient

from deltachain.errors import ApplyError, ConfigError, PartialApplyError
from deltachain.replica.settings import ReplicaSettings
from deltachain_vllm import BACKEND
from deltachain_vllm.compat import check_version, mode_in_doubt, pause, pause_mode
from deltachain_vllm.extension import EXTENSION, knows_us


class VllmEngine:
    """See :class:`deltachain.replica.engine.Engine`; called from any thread but the loop's.

    Args:
        client: The server's.
        loop: The one that the client lives on.
        settings: Of this replica.

    Raises:
        ConfigError: The server was started in a way that deltachain cannot work with.
        EngineVersionError: This vLLM was not tested.

    Attributes:
        asleep: Whether its weights are released.
    """

    def __init__(
        self, client: EngineClient, loop: asyncio.AbstractEventLoop, settings: ReplicaSettings
    ) -> None:
        check_version()
        self.mode = pause_mode(settings.pause)
        _check(client)
        transfer = client.vllm_config.weight_transfer_config
        self._in_session = transfer is not None and transfer.backend == BACKEND
        self._client = client
        self._loop = loop
        self.asleep = False
        self._clear, self._doubted = not settings.keep_cache, False

    def call(self, verb: str, **arguments: Any) -> Sequence[Mapping[str, Any]]:  # noqa: ANN401
        """Ask every worker; a swap goes through vLLM's own update session where it has one.

        Raises:
            PartialApplyError: Somebody else writes; nothing was written.
            ApplyError: The server has released its weights, or does not answer.
        """
        if self.asleep:
            raise ApplyError("the engine has released its weights", hint="POST /wake_up wakes it")
        in_session = verb == "swap" and self._in_session
        answers: Sequence[Mapping[str, Any]] = self._wait(
            self._swap(arguments) if in_session else self._ask(verb, arguments)
        )
        if any(answer.get("busy") for answer in answers):
            raise PartialApplyError(
                "somebody else has opened an update session in this server",
                hint="POST /finish_weight_update ends it",
            )
        return answers

    def is_paused(self) -> bool:
        """Whether the scheduler is."""
        return bool(self._wait(self._client.is_paused()))

    def pause(self, *, in_doubt: bool = False) -> None:
        """Pause the scheduler in the mode of this replica; cached prefixes go, unless kept."""
        self._doubted |= in_doubt
        mode = mode_in_doubt(self.mode) if in_doubt else self.mode
        self._wait(pause(self._client, mode, clear=self._clear or self._doubted))

    def resume(self) -> None:
        """Resume the scheduler."""
        self._wait(self._client.resume_generation())

    def name_version(self, version: int) -> None:
        """Name the version that tokens are made with; no prefix of older ones is left."""
        self._wait(self._name(version))

    def fall_asleep(self) -> None:
        """Read and write nothing from here on; wait for what reads beside the engine."""
        self.asleep = True
        self._wait(self._ask("settle", {}))

    async def _ask(self, verb: str, arguments: dict[str, Any]) -> Sequence[Mapping[str, Any]]:
        found: Any = await self._client.collective_rpc(f"deltachain_{verb}", kwargs=arguments)
        return list(found)

    async def _swap(self, arguments: dict[str, Any]) -> Sequence[Mapping[str, Any]]:
        try:
            await self._client.start_weight_update()
        except Exception as exc:
            raise PartialApplyError(f"vLLM opened no update session: {exc}") from exc
        request = WeightTransferUpdateRequest(update_info=arguments)
        await self._client.update_weights(request)
        # Every question of its own is a round trip in which nobody generates.
        verdicts: Sequence[Mapping[str, Any]]
        verdicts, _ = await asyncio.gather(
            self._ask("verdict", {"turn": arguments["turn"]}),
            self._client.finish_weight_update(),
        )
        return verdicts

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

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        except ApplyError:
            raise
        except Exception as exc:  # vLLM raises plain exceptions, a dead engine's among them
            raise ApplyError(f"the engine did not answer: {exc}") from exc


def _check(client: EngineClient) -> None:
    parallel = client.vllm_config.parallel_config
    if not knows_us(parallel.worker_extension_cls):
        raise ConfigError(
            "the workers of this server know nothing of deltachain",
            hint=f"start it with --worker-extension-cls {EXTENSION}",
        )
