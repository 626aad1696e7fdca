"""An SGLang server as the leader of its ranks: asked from the leader's thread."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from deltachain.errors import ApplyError
from deltachain.subscribe.settings import ReplicaSettings
from deltachain_sglang import SCHEME, compat


class ServerEngine:
    """See :class:`deltachain.subscribe.engine.Engine`; called from any thread but the loop's.

    Args:
        server: SGLang's ``TokenizerManager``.
        loop: The one that it lives on.
        settings: Of this replica.

    Raises:
        ConfigError: The server was started in a way that deltachain can not work with.
        EngineVersionError: This SGLang was not tested.
    """

    def __init__(
        self,
        server: Any,  # noqa: ANN401 - SGLang's
        loop: asyncio.AbstractEventLoop,
        settings: ReplicaSettings,
    ) -> None:
        compat.check_version()
        compat.check_layout()
        self.mode = compat.pause_mode(settings.pause)
        self._server = compat.Server(server)
        self._loop = loop
        self._flush = not settings.keep_cache and self.mode != "in_place"

    def call(self, verb: str, **arguments: Any) -> Sequence[Mapping[str, Any]]:  # noqa: ANN401
        """Ask every rank; a swap is an update of SGLang's own."""
        question = SCHEME + json.dumps({"verb": verb, "arguments": arguments})
        text = self._wait(
            self._server.update(question, flush=self._flush)
            if verb == "swap"
            else self._server.question(question)
        )
        try:
            answers: list[Mapping[str, Any]] = json.loads(text)
        except ValueError as exc:
            raise ApplyError(f"the engine did not answer {verb!r}: {text}") from exc
        return answers

    def pause(self) -> None:
        """Pause in the mode of this replica."""
        self._wait(self._server.pause(self.mode))

    def resume(self) -> None:
        """Generate again."""
        self._wait(self._server.resume())

    def name_version(self, version: int) -> None:
        """Name the version that tokens are made with; the swap has flushed what came before."""
        self._wait(self._server.name(str(version)))

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        except ApplyError:
            raise
        except Exception as exc:  # SGLang raises plain exceptions
            raise ApplyError(f"the engine did not answer: {exc}") from exc
