"""Subscription of vLLM's offline ``LLM`` to a chain, without server or HTTP."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deltachain.errors import ApplyError, ConfigError
from deltachain.replica.messages import RankReply, RankRequest, decode_reply, encode, name_of
from deltachain.replica.settings import spool_folder
from deltachain.replica.target import ReplicaTarget
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain_vllm import HANDLE
from deltachain_vllm.extension import EXTENSION, has_extension

if TYPE_CHECKING:
    from vllm import LLM


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


def subscribe(llm: LLM, config: SubscribeConfig | str) -> Subscriber:
    """Return a subscriber whose target is an offline ``LLM``.

    >>> llm = LLM(model, worker_extension_cls="deltachain_vllm.WorkerExtension")  # doctest: +SKIP
    >>> deltachain_vllm.subscribe(llm, "s3://bucket/run").update()                # doctest: +SKIP

    Raises:
        ConfigError: The ``LLM`` was created without the extension.
    """
    parallel = llm.llm_engine.vllm_config.parallel_config
    if not has_extension(parallel.worker_extension_cls):
        raise ConfigError(
            "the workers of this LLM have no deltachain extension",
            hint=f'make it with worker_extension_cls="{EXTENSION}"',
        )
    url = config if isinstance(config, str) else config.url
    target = ReplicaTarget(OfflineEngine(llm), url, spool_folder(os.environ))
    return Subscriber(config, target)
