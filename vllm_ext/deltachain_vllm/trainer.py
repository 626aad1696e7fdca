"""The trainer's half of the backend ``deltachain``, registered with vLLM when this is imported."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch.distributed
from torch import Tensor, nn
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from deltachain.errors import ConfigError, ControlPlaneError
from deltachain.publish import PublishConfig, Publisher

from . import BACKEND


def _own_rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


@dataclass
class DeltaChainTrainerInit(base.TrainerInitInfo):  # type: ignore[misc]
    """Where a trainer publishes: what ``WeightTransferTrainerFactory.trainer_init`` takes.

    Attributes:
        url: Location of the chain, which the replicas follow as well.
        settings: Fields of :class:`~deltachain.PublishConfig`, such as ``{"dtype": "BF16"}``.
        rank: Rank of this trainer; by default that in ``torch.distributed``.
    """

    backend: ClassVar[str] = BACKEND
    url: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    rank: int = field(default_factory=_own_rank, kw_only=True)


class DeltaChainTrainer(base.TrainerWeightTransferEngine[DeltaChainTrainerInit]):  # type: ignore[misc]
    """Publishes each round as the next version, then names that version to the replicas.

    Create it by vLLM's factory, and call ``send_weights`` and ``shutdown``, on every rank. Each
    rank publishes the tensors that it holds; one on several ranks is published once. ``client`` is
    one client or a list of them: their servers follow the same chain. ``source`` is a
    ``WeightSource``, or the module itself: then no rank gathers a sharded tensor.

    Attributes:
        publisher: The publisher.
    """

    init_info_cls = DeltaChainTrainerInit
    publisher: Publisher

    @classmethod
    def trainer_init(
        cls,
        init_info: DeltaChainTrainerInit,
        *,
        client: "base.VLLMWeightSyncClient | Sequence[base.VLLMWeightSyncClient]",
        source: "base.WeightSource | nn.Module | None" = None,
    ) -> Self:
        """Create or continue the chain, so that its newest version equals the current weights.

        Raises:
            ConfigError: There is no source, or a setting is not allowed.
            ControlPlaneError: A server has another backend, or did not answer.
            DeltaChainError: The chain was refused; see :meth:`deltachain.Publisher.attach`.
        """
        if source is None:
            raise ConfigError("no weights to publish", hint="give source=ModuleSource(model)")
        waits = {"when_busy": "wait", "on_error": "warn"}  # each round raises its own error
        config = PublishConfig.at(init_info.url, None, **{**waits, **init_info.settings})
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine._call("init_weight_transfer_engine", {})
        model = source if isinstance(source, nn.Module) else lambda: _held(source)
        engine.publisher = Publisher(config).attach(model)
        return engine

    def send_weights(self) -> None:
        """Commit the current weights; return once every replica holds that version.

        Raises:
            ControlPlaneError: A replica did not move. The version is committed: it, or a later one
                in the next round, can still be taken.
            DeltaChainError: Publishing failed, and nothing was named; the next round covers it.
        """
        receipt = self.publisher.publish().result()
        self._call("update_weights", {"version": receipt.version, "manifest": receipt.manifest})

    def shutdown(self) -> None:
        self.publisher.close()

    def _call(self, method: str, info: Mapping[str, Any]) -> None:
        """Call a method of all clients at the same time; raise the first error after the last."""
        if not self.is_sender:
            return
        clients = self.client if isinstance(self.client, Sequence) else [self.client]
        with ThreadPoolExecutor(len(clients)) as pool:
            calls = [pool.submit(getattr(client, method), dict(info)) for client in clients]
        for client, error in zip(clients, (call.exception() for call in calls), strict=True):
            if error is not None:
                reply = getattr(getattr(error, "response", None), "text", "")
                name = getattr(client, "base_url", type(client).__name__)
                raise ControlPlaneError(f"{name}: {method}({info}): {error} {reply}") from error


def _held(source: "base.WeightSource") -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in source if tensor is not None)


WeightTransferTrainerFactory.register_engine(BACKEND, DeltaChainTrainer)
