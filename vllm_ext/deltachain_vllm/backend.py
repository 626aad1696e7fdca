"""The weight-transfer backend ``deltachain``: a swap inside vLLM's own update session.

The session keeps every other backend and trainer away from the weights, and lets vLLM reset what
it derives from them. What is written was staged and proven before. The reply is kept until the
leader asks for it, because an exception in a worker would misalign vLLM's replies.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

import msgspec
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deltachain.replica.messages import SwapRequest
from deltachain_vllm.extension import worker_service

logger = logging.getLogger(__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing: a replica follows the one chain that it was started with."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The fields of a :class:`SwapRequest`, as vLLM's update session carries them."""

    ticket: int
    version: int
    back: bool = False
    leader: str = ""
    sequence: int = 0


class DeltaChainEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Writes only what this replica's leader had staged; see :class:`WeightTransferEngine`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to open."""

    def start_weight_update(self) -> None:
        """Nothing to prepare: weights are written in place."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Write, and keep the reply."""
        try:
            request = msgspec.convert(asdict(update_info), SwapRequest)
        except msgspec.ValidationError as exc:
            logger.warning("ignored an update that is not a swap request: %s", exc)
            return
        worker_service(self.model, self.vllm_config, self.parallel_config.rank).handle(request)

    def finish_weight_update(self) -> None:
        """Nothing to finish."""

    def shutdown(self) -> None:
        """Nothing to close."""
