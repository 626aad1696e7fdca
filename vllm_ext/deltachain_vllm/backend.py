"""The weight-transfer backend ``deltachain``: a swap inside vLLM's own update session.

The session excludes every other backend and trainer from the weights, and lets vLLM reset its
derived state. The written bits were staged and proven before. The reply is kept until the leader
requests it, because an exception in a worker would misalign vLLM's replies.
"""

import logging
from dataclasses import asdict, dataclass

import msgspec
from vllm.distributed.weight_transfer import base

from deltachain.replica.messages import SwapRequest

from .extension import worker_service

logger = logging.getLogger(__name__)


@dataclass
class InitInfo(base.WeightTransferInitInfo):  # type: ignore[misc]
    """Initialisation without fields, since a replica follows the one chain of its start."""


@dataclass
class UpdateInfo(base.WeightTransferUpdateInfo):  # type: ignore[misc]
    """The fields of a :class:`SwapRequest`, as vLLM's update session carries them."""

    ticket: int
    version: int
    back: bool = False
    leader: str = ""
    sequence: int = 0
    of_draft: bool = False


class DeltaChainEngine(base.WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Backend that writes only staged bits of this replica's leader; see its base class."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None: ...

    def start_weight_update(self) -> None: ...

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Write the staged bits, and keep the reply."""
        try:
            request = msgspec.convert(asdict(update_info), SwapRequest)
        except msgspec.ValidationError as exc:
            logger.warning("ignored an update that is not a swap request: %s", exc)
            return
        worker_service(self.model, self.vllm_config, self.parallel_config.rank).handle(request)

    def finish_weight_update(self) -> None: ...

    def shutdown(self) -> None: ...
