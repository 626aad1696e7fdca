"""Subscription of SGLang's ``Engine`` in this process to a chain, without server or HTTP."""

from __future__ import annotations

import os
from collections.abc import Coroutine
from typing import Any, TypeVar

from typing_extensions import override

from deltachain.errors import UnsupportedEngineError
from deltachain.replica.settings import ReplicaSettings
from deltachain.replica.target import ReplicaTarget
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain_sglang import compat
from deltachain_sglang.server import SglangEngine

_T = TypeVar("_T")


class InProcessEngine(SglangEngine):
    """An ``Engine`` of SGLang, whose event loop may run only during its calls."""

    @override
    def _wait(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        if self._loop.is_running():
            return super()._wait(coroutine)
        return self._loop.run_until_complete(coroutine)


def subscribe(engine: Any, config: SubscribeConfig | str) -> Subscriber:  # noqa: ANN401 - SGLang's
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
