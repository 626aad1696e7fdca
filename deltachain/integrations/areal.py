"""AReaL: weight updates that are versions of a chain, in place of checkpoints on a shared disk."""

import os
from dataclasses import replace
from typing import Any

import torch
from areal.api import TrainEngine
from torch import distributed

from deltachain.control.announce import tell
from deltachain.errors import ConfigError, ControlPlaneError, DeltaChainError
from deltachain.publish import PublishConfig, Publisher


def publishing(
    engine: type[TrainEngine],
    url: str,
    *,
    deadline_s: float = 300.0,
    **settings: Any,  # noqa: ANN401 - fields of PublishConfig
) -> type[TrainEngine]:
    """Return a training engine of AReaL whose ranks publish their shards.

    Servers follow the chain. AReaL's launchers tell trainers where they are, by the variable
    ``AREAL_LLM_SERVER_ADDRS``; ``DELTACHAIN_TOKEN`` is the token of their routes. They generate
    while a version is published and staged, and nothing is aborted. LoRA goes AReaL's own way.

    Args:
        engine: Class of the engine, such as ``areal.engine.FSDPPPOActor``.
        url: Location of the chain.
        deadline_s: Seconds that an update waits for the servers.
        settings: Fields of :class:`~deltachain.PublishConfig`; ``dtype`` is the engine's.
    """
    given = {"_given": (url, deadline_s, settings)}
    return type(engine.__name__, (_Publishing, engine), given)


class _Publishing(TrainEngine):  # type: ignore[misc]  # AReaL's types come with AReaL
    _given: tuple[str, float, dict[str, Any]]
    _publisher: Publisher | None = None

    def connect_engine(self, engine: Any, meta: Any) -> None:  # noqa: ANN401 - AReaL's
        """Connect, without the group of NCCL that its mode ``xccl`` makes, but for LoRA."""
        super().connect_engine(engine, meta if meta.use_lora else replace(meta, type="disk"))

    def update_weights(self, meta: Any) -> None:  # noqa: ANN401 - AReaL's WeightUpdateMeta
        """Commit the weights; return on every rank once all servers hold that version.

        Raises:
            ConfigError: The launcher named no server.
            ControlPlaneError: A server does not hold the version in time; a later one covers it.
            DeltaChainError: Publishing failed; the next update covers it.
        """
        if meta.use_lora:
            super().update_weights(meta)
            return
        servers = [one for one in os.environ.get("AREAL_LLM_SERVER_ADDRS", "").split(",") if one]
        if not servers:
            hint = "start the trainer by a launcher of AReaL, or set AREAL_LLM_SERVER_ADDRS"
            raise ConfigError("no server to tell of the weights", hint=hint)
        url, deadline_s, settings = self._given
        if self._publisher is None:
            waits = {"when_busy": "wait", "on_error": "warn"}  # each update raises its own error
            given = waits | {"dtype": getattr(torch, self.config.dtype)} | settings
            config = PublishConfig.at(url, None, **given)
            self._publisher = Publisher(config).attach(self.model)
        receipt, trouble = self._publisher.publish(step=meta.version).result(), [""]
        if distributed.get_rank() == 0:
            try:
                tell(servers, receipt.version, deadline=deadline_s)
            except DeltaChainError as error:  # the other ranks wait
                trouble = [str(error)]
        distributed.broadcast_object_list(trouble, group=self.cpu_group)
        if trouble[0]:
            raise ControlPlaneError(trouble[0])

    def destroy(self) -> None:
        """Close the publisher, then what AReaL has."""
        if self._publisher is not None:
            self._publisher.close()
        super().destroy()
