"""verl: the checkpoint engine ``deltachain``, and a manager for engines that follow the chain."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from verl import checkpoint_engine as base
from verl.utils.ray_utils import auto_await

from deltachain import errors
from deltachain.chain.chain import Chain
from deltachain.control.announce import tell
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import open_store
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain.subscribe.follow_loop import NEEDS_A_PERSON
from deltachain.torch_names import TORCH_DTYPES

BACKEND: Final = "deltachain"
DEADLINE_S: Final = 300.0
POLL_S: Final = 0.1


@base.CheckpointEngineRegistry.register(BACKEND)
class DeltaChainCheckpointEngine(base.CheckpointEngine):  # type: ignore[misc]  # verl has no types
    """Publishes what verl gathers, tensor by tensor, on rank 0 of the actor.

    A rollout worker keeps the weights in host memory, fetches what changed, and yields all tensors
    to its engine. verl gives ``bucket_size`` and ``is_master``, ``engine_kwargs`` all others.

    Args:
        url: Location of the chain.
        deadline_s: Seconds that a rollout worker waits for the version of a step.
        settings: Fields of :class:`~deltachain.PublishConfig`, such as ``dtype="BF16"``.
    """

    def __init__(self, url: str, *, deadline_s: float = DEADLINE_S, **settings: Any) -> None:  # noqa: ANN401 - fields
        self._is_master, _ = settings.pop("is_master", False), settings.pop("bucket_size", 0)
        waits = {"when_busy": "wait", "on_error": "warn"}  # each step raises its own error
        self.config, self._deadline_s = PublishConfig.at(url, None, **waits | settings), deadline_s
        self._store = open_store(url, self.config.storage_options)
        self._sent: Iterable[tuple[str, Tensor]] = ()
        self._weights: dict[str, Tensor] = {}
        self._publisher: Publisher | None = None
        self._subscriber: Subscriber | None = None

    def prepare(self) -> dict[str, Any]:
        """Return the newest version before this step, on rank 0 of the actor."""
        if self._publisher is not None:
            return {"after": self._publisher.version}
        try:
            head = Chain.open(self._store).head() if self._is_master else None
        except errors.ObjectNotFoundError:
            head = None
        return {"after": head.version + 1 if head else 0}  # the first one is of ``attach``

    @classmethod
    def build_topology(cls, actors: int, rollouts: int, metadata: Sequence[Any]) -> tuple[Any, Any]:
        """Tell every worker the newest version before this step."""
        after = [metadata[0]["after"]]
        return {"after": after * actors}, {"after": after * rollouts}

    def init_process_group(self, after: int) -> None:
        self._after = after

    def finalize(self) -> None: ...

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, float] | None:
        """Commit a version whose step is ``global_steps``; called on every rank.

        Raises:
            DeltaChainError: Publishing failed; the next call covers it. An adapter is refused.
        """
        on_host = ((name, _on_host(name, tensor)) for name, tensor in weights)
        if not self._is_master:
            for _ in on_host:  # a gather needs all ranks
                pass
            return None
        self._sent = on_host if self._publisher else list(on_host)  # attach iterates more than once
        if self._publisher is None:
            publisher = Publisher(self.config)
            self._publisher = publisher.attach(lambda: iter(self._sent), alone=True)
        receipt, self._sent = self._publisher.publish(step=global_steps).result(), ()
        return receipt.metrics()

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield all tensors of the version that this step published, bit by bit.

        Raises:
            ChainError: There was no such version in time.
            DeltaChainError: It cannot be fetched, or is not what was published.
        """
        await asyncio.to_thread(self._take, global_steps)
        for name, tensor in self._weights.items():
            yield name, tensor

    def _take(self, step: int | None) -> None:
        until, trouble = time.monotonic() + self._deadline_s, None
        while time.monotonic() < until:
            try:
                self._subscriber = self._subscriber or self._subscribe()
                self._subscriber.update()
                last = self._subscriber.last
                if last and last.version > self._after and step in (None, last.step):
                    return
            except NEEDS_A_PERSON:
                raise
            except errors.DeltaChainError as exc:  # no version yet, or a store that fails for now
                trouble = exc
            time.sleep(POLL_S)
        wanted = f"version of step {step} after version {self._after} in {self._deadline_s:g} s"
        hint = "see the log of the actor's rank 0, which publishes it"
        raise errors.ChainError(f"{self.config.url} got no {wanted}", hint=hint) from trouble

    def _subscribe(self) -> Subscriber:
        for spec in Chain.open(self._store).table.specs():
            self._weights[spec.name] = torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
        return Subscriber(SubscribeConfig(url=self.config.url), self._weights, store=self._store)


def _on_host(name: str, tensor: Tensor) -> Tensor:
    if ".base_layer." in name:
        hint = "set actor_rollout_ref.model.lora.merge=True"
        raise errors.UnsupportedModelError(f"verl sends {name!r} without its adapter", hint=hint)
    return tensor.detach().cpu()


class FollowingManager(base.CheckpointEngineManager):  # type: ignore[misc]
    """Manager for engines that follow the chain: ``rollout.checkpoint_manager_class`` names it.

    They generate while a version is published and staged, and nothing is aborted. A step ends once
    all of them hold its version. ``DELTACHAIN_TOKEN`` is the token of their routes.
    """

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> dict[str, float]:
        """Publish, and wait for all engines.

        Raises:
            ControlPlaneError: An engine does not hold the version in time; a later step covers it.
            DeltaChainError: Publishing failed.
        """
        sending = self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend)
        metrics: dict[str, float] = next(filter(None, await asyncio.gather(*sending)))
        servers = [replica.server_address for replica in self.replicas]
        wait_s = self.config.engine_kwargs[BACKEND].get("deadline_s", DEADLINE_S)
        await asyncio.to_thread(tell, servers, int(metrics["deltachain/version"]), deadline=wait_s)
        labels = (one.server_handle.set_global_steps for one in self.replicas)
        await asyncio.gather(*(label.remote(global_steps) for label in labels))
        return metrics
