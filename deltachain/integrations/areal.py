"""AReaL: weight updates that are versions of a chain, in place of checkpoints on a shared disk."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from areal.api import TrainEngine
from torch import distributed

from deltachain.control.announce import Fleet
from deltachain.errors import ConfigError, ControlPlaneError, DeltaChainError
from deltachain.publish import PublishConfig, Publisher


class PublishingActor(TrainEngine):  # type: ignore[misc]  # AReaL's types come with AReaL
    """First base of a training engine of AReaL: each rank publishes its shards.

    Servers follow the chain. AReaL's launchers tell trainers where they are, by the variable
    ``AREAL_LLM_SERVER_ADDRS``; ``DELTACHAIN_TOKEN`` is the token of their routes. They generate
    while a version is published and staged, and nothing is aborted. LoRA goes AReaL's own way.

    Attributes:
        chain: Location of the chain, to set in a subclass.
        settings: Fields of :class:`~deltachain.PublishConfig`. The dtype is the engine's.
        deadline_s: Seconds that an update waits for the servers.
    """

    chain: ClassVar[str]
    settings: ClassVar[Mapping[str, Any]] = {}
    deadline_s: ClassVar[float] = 300.0
    _publisher: Publisher | None = None

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
        addresses = [one for one in os.environ.get("AREAL_LLM_SERVER_ADDRS", "").split(",") if one]
        if not addresses:
            hint = "start the trainer by a launcher of AReaL, or set AREAL_LLM_SERVER_ADDRS"
            raise ConfigError("no server to tell of the weights", hint=hint)
        if self._publisher is None:
            waits = {"when_busy": "wait", "on_error": "warn"}  # each update raises its own error
            dtype = getattr(torch, self.config.dtype)
            config = PublishConfig.at(
                self.chain, None, **{**waits, "dtype": dtype, **self.settings}
            )
            self._publisher = Publisher(config).attach(self.model)
        receipt = self._publisher.publish(step=meta.version).result()
        trouble = [_trouble(addresses, receipt.version, self.deadline_s)]
        distributed.broadcast_object_list(trouble, group=self.cpu_group)  # what rank 0 found
        if trouble[0]:
            raise ControlPlaneError(trouble[0])

    def destroy(self) -> None:
        """Close the publisher, then what AReaL has."""
        if self._publisher is not None:
            self._publisher.close()
        super().destroy()


def _trouble(addresses: Sequence[str], version: int, deadline_s: float) -> str:
    """Tell servers of a version, on rank 0; return why it cannot be said that they hold it."""
    if distributed.get_rank():
        return ""
    token = os.environ.get("DELTACHAIN_TOKEN", "")
    try:
        with Fleet([f"http://{one}" for one in addresses], token=token) as fleet:
            told = fleet.announce(version, deadline=deadline_s)
    except DeltaChainError as error:  # the other ranks wait
        return str(error)
    return "" if told.enough else f"{told}: {dict(told.trouble)}"
