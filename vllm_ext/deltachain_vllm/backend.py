"""The weight-transfer backend ``deltachain``: a swap inside vLLM's own update session.

The session keeps every other backend and trainer away from the weights, and lets vLLM reset what
it derives from them. What is written was staged and proven before; its verdict is kept for
``deltachain_verdict``, because an exception in a worker would misalign vLLM's answers.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deltachain_vllm.extension import worker_verbs


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing: a replica follows the one chain that it was started with."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What to write.

    Attributes:
        ticket: Under which every rank has staged it.
        version: The version it leads to.
        turn: The number of the leader's call.
        back: Whether it is taken back.
    """

    ticket: int
    version: int
    turn: str = ""
    back: bool = False


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
        """Write, and keep the verdict."""
        worker_verbs(self.model, self.vllm_config, self.parallel_config.rank).do(
            "swap",
            {
                "turn": update_info.turn,
                "ticket": update_info.ticket,
                "version": update_info.version,
                "back": update_info.back,
            },
        )

    def finish_weight_update(self) -> None:
        """Nothing to finish."""

    def shutdown(self) -> None:
        """Nothing to close."""
