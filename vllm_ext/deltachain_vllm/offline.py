"""Subscription of an engine of vLLM in this process to a chain, without server or HTTP."""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from vllm.engine.protocol import EngineClient

from deltachain.errors import ApplyError, ConfigError
from deltachain.replica.messages import RankReply, RankRequest, decode_reply, encode, name_of
from deltachain.replica.settings import ReplicaSettings
from deltachain.replica.target import ReplicaTarget
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain_vllm import HANDLE
from deltachain_vllm.compat import check_experts, check_layout
from deltachain_vllm.extension import check_extension
from deltachain_vllm.server import VllmEngine

if TYPE_CHECKING:
    from vllm import LLM

ARGUMENT: Final = "worker_extension_cls"
"""Argument that names the extension of an engine's workers."""


class OfflineEngine:
    """An offline ``LLM`` as :class:`deltachain.replica.engine.Engine`; idle between its calls.

    Args:
        llm: ``LLM`` created with ``worker_extension_cls="deltachain_vllm.WorkerExtension"``.
    """

    software = "vllm"

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def call(self, request: RankRequest) -> Sequence[RankReply]:
        """Send a request to every worker, and return the replies."""
        try:
            texts = self.llm.collective_rpc(HANDLE, args=(encode(request),))
        except Exception as exc:
            raise ApplyError(f"the engine did not answer {name_of(request)!r}: {exc}") from exc
        return [decode_reply(text) for text in texts]

    def is_dead(self) -> bool:
        """Return false: a dead engine raises in the next call."""
        return False

    def is_paused(self) -> bool:
        """Return false: nothing is generated between two ``generate`` calls."""
        return False

    def pause(self, *, in_doubt: bool = False) -> None:
        """Do nothing: see ``is_paused``."""

    def resume(self) -> None:
        """Do nothing: see ``is_paused``."""

    def name_version(self, version: int) -> None:
        """Record the version, and drop every cached prefix."""
        if not self.llm.reset_prefix_cache():
            raise ApplyError("the prefix cache could not be reset", version=version)
        self.llm.llm_engine.set_weight_version(str(version))


def subscribe(llm: LLM | EngineClient, config: SubscribeConfig | str) -> Subscriber:
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
    engine: OfflineEngine | VllmEngine
    if isinstance(llm, EngineClient):
        check_extension(llm.vllm_config, ARGUMENT)
        check_layout(llm, Namespace())
        engine = VllmEngine(llm, _loop_of(llm), settings)
    elif hasattr(llm, "llm_engine"):
        check_extension(llm.llm_engine.vllm_config, ARGUMENT)
        check_experts(llm.llm_engine.vllm_config)
        engine = OfflineEngine(llm)
    else:
        raise ConfigError(
            f"{type(llm).__name__} is no engine to subscribe", hint="pass an LLM or an AsyncLLM"
        )
    target = ReplicaTarget(engine, settings.subscribe.url, settings.spool)
    return Subscriber(settings.subscribe, target)


def _loop_of(client: Any) -> asyncio.AbstractEventLoop:  # noqa: ANN401 - vLLM's client
    """Return the event loop in which an asynchronous engine lives."""
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
