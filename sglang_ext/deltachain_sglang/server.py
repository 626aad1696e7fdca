"""An SGLang server as the leader of its ranks: asked from the leader's thread."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final

from deltachain.errors import ApplyError, PartialApplyError
from deltachain.replica.settings import ReplicaSettings
from deltachain_sglang import SCHEME, compat

BUSY_S: Final = 5.0
"""How long a swap waits for requests that were aborted: schedulers notice it in their next step."""

BUSY_LOOK_S: Final = 0.005


class SglangEngine:
    """See :class:`deltachain.replica.engine.Engine`; called from any thread but the loop's.

    Args:
        server: SGLang's ``TokenizerManager``.
        loop: The one that it lives on.
        settings: Of this replica.

    Raises:
        ConfigError: The server was started in a way that deltachain cannot work with.
        EngineVersionError: This SGLang was not tested.
    """

    def __init__(
        self,
        server: Any,  # noqa: ANN401 - SGLang's
        loop: asyncio.AbstractEventLoop,
        settings: ReplicaSettings,
    ) -> None:
        compat.check_version()
        compat.check_layout(keep_cache=settings.keep_cache)
        self.mode = compat.pause_mode(settings.pause)
        self._server = compat.Server(server)
        self._loop = loop
        self._flush = not settings.keep_cache and self.mode != "in_place"
        self._doubted = False

    def call(self, verb: str, **arguments: Any) -> Sequence[Mapping[str, Any]]:  # noqa: ANN401
        """Ask every rank; caches go with a swap.

        Raises:
            PartialApplyError: Requests that were aborted do not end; nothing was written.
            ApplyError: The server has released its weights.
        """
        flush = verb == "swap" and (self._flush or self._doubted)
        body = {"verb": verb, "arguments": arguments, "flush": flush}
        until = time.monotonic() + BUSY_S
        while True:
            answers: list[Mapping[str, Any]] = self._ask(SCHEME + json.dumps(body), verb)
            if any(answer.get("asleep") for answer in answers):
                raise ApplyError(
                    "the engine has released its weights",
                    hint="POST /resume_memory_occupation wakes it",
                )
            if not any(answer.get("busy") for answer in answers):
                return answers
            if time.monotonic() > until:
                raise PartialApplyError("requests are running that the pause did not end")
            time.sleep(BUSY_LOOK_S)

    def is_paused(self) -> bool:
        """Whether somebody has paused it."""
        return self._server.is_paused()

    def pause(self, *, in_doubt: bool = False) -> None:
        """Pause in the mode of this replica; nobody's cache is kept that may be wrong."""
        self._doubted |= in_doubt
        keeps = self.mode == "in_place" and self._doubted
        self._wait(self._server.pause("retract" if keeps else self.mode))

    def resume(self) -> None:
        """Generate again."""
        self._wait(self._server.resume())

    def name_version(self, version: int) -> None:
        """Name the version that tokens are made with; the swap has flushed what came before."""
        self._wait(self._server.name(str(version)))
        self._doubted = False

    def _ask(self, question: str, verb: str) -> list[Mapping[str, Any]]:
        text = self._wait(self._server.question(question))
        try:
            answers: list[Mapping[str, Any]] = json.loads(text)
        except ValueError as exc:
            raise ApplyError(f"the engine did not answer {verb!r}: {text}") from exc
        return answers

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        except ApplyError:
            raise
        except Exception as exc:  # SGLang raises plain exceptions
            raise ApplyError(f"the engine did not answer: {exc}") from exc
