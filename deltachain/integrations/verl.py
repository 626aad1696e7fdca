"""The checkpoint engine ``deltachain`` of verl, registered when verl imports this module.

Its ``rollout.checkpoint_engine.custom_backend_module`` names it.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import closing
from typing import Any, Final

import ray
import torch
from torch import Tensor
from verl import checkpoint_engine as base
from verl.utils.ray_utils import auto_await

from deltachain import errors
from deltachain.chain.chain import Chain, Committed
from deltachain.control.announce import Fleet
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import open_store
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import Version

BACKEND: Final = "deltachain"
DEADLINE_S: Final = 300.0
POLL_S: Final = 0.1


@base.CheckpointEngineRegistry.register(BACKEND)
class DeltaChainCheckpointEngine(base.CheckpointEngine):  # type: ignore[misc]
    """Publishes what verl gathers, tensor by tensor, on rank 0 of the actor.

    A rollout worker keeps the weights in host memory, fetches what changed, and yields all tensors
    to its engine. Engines that follow the chain themselves need none of this: see
    :class:`FollowingManager`.

    Args:
        url: Location of the chain; this and the others are ``engine_kwargs.deltachain``.
        deadline_s: Seconds that a rollout worker waits for the version of a step.
        settings: Fields of :class:`~deltachain.PublishConfig`, such as ``dtype="BF16"``.
        bucket_size: Size of a bucket; without effect.
        is_master: Whether this is rank 0 of the actor.
    """

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float = DEADLINE_S,
        bucket_size: int = 0,
        is_master: bool = False,
        **settings: Any,  # noqa: ANN401 - the fields of PublishConfig
    ) -> None:
        del bucket_size
        waits = {"when_busy": "wait", "on_error": "warn"}  # each step raises its own error
        self.config = PublishConfig.at(url, None, **{**waits, **settings})
        self._deadline_s, self._is_master = deadline_s, is_master
        self._publisher: Publisher | None = None
        self._sent: Iterable[tuple[str, Tensor]] = ()
        self._subscriber: Subscriber | None = None
        self._weights: dict[str, Tensor] = {}
        self._after: Version = -1

    def prepare(self) -> dict[str, Any]:
        """Return the newest version, on rank 0 of the actor."""
        if not self._is_master:
            return {}
        if self._publisher is not None:
            return {"after": self._publisher.version}
        with closing(open_store(self.config.url, self.config.storage_options)) as store:
            try:
                head = Chain.open(store).head()
            except errors.ObjectNotFoundError:
                head = None
        return {"after": head.version if head else -1}

    @classmethod
    def build_topology(
        cls, actors: int, rollouts: int, metadata: Sequence[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tell every worker which version was the newest before this step."""
        after = [one["after"] for one in metadata if "after" in one]
        return {"after": after * actors}, {"after": after * rollouts}

    def init_process_group(self, after: Version) -> None:
        self._after = after

    def finalize(self) -> None: ...

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, float] | None:
        """Commit a version whose step is ``global_steps``; called on every rank.

        Raises:
            DeltaChainError: Publishing failed; the next call covers it.
        """
        on_host = ((name, tensor.detach().cpu()) for name, tensor in weights)
        if not self._is_master:
            for _ in on_host:  # a gather needs all ranks
                pass
            return None
        if self._publisher is None:
            self._sent = list(on_host)  # attach iterates more than once
            publisher = Publisher(self.config)
            self._publisher = publisher.attach(lambda: iter(self._sent), alone=True)
        else:
            self._sent = on_host
        receipt = self._publisher.publish(step=global_steps).result()
        self._sent = ()
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
                subscriber = self._subscriber = self._subscriber or self._open()
                if (found := self._find(subscriber.chain, step)) is not None:
                    subscriber.update(found)
                    return
            except (
                errors.ObjectNotFoundError,
                errors.StoreUnavailableError,
            ) as exc:  # no version yet
                trouble = exc
            time.sleep(POLL_S)
        raise errors.ChainError(
            f"{self.config.url} got no version of step {step} after version {self._after} in "
            f"{self._deadline_s:g} s",
            hint="see the log of the actor's rank 0, which publishes it",
        ) from trouble

    def _open(self) -> Subscriber:
        url, options = self.config.url, self.config.storage_options
        with closing(open_store(url, options)) as store:
            specs = Chain.open(store).table.specs()
        self._weights = {
            spec.name: torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype]) for spec in specs
        }
        return Subscriber(SubscribeConfig(url=url, storage_options=options), self._weights)

    def _find(self, chain: Chain, step: int | None) -> Committed | None:
        """Return the first version of a step after the newest one before it, if it is committed."""
        version = self._after + 1
        while found := chain.find(version):
            # The first version of an epoch repeats its parent, and the step of that.
            before = chain.read(version - 1).manifest.epoch if version else found.manifest.epoch
            if step in (None, found.manifest.step) and found.manifest.epoch == before:
                return found
            version += 1
        return None


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
        return await asyncio.to_thread(self._update, global_steps)

    def _update(self, step: int | None) -> dict[str, float]:
        sent = ray.get(self.actor_wg.update_weights(global_steps=step, mode=self.backend))
        metrics: dict[str, float] = next(filter(None, sent))
        deadline_s = self.config.engine_kwargs[BACKEND].get("deadline_s", DEADLINE_S)
        addresses = [f"http://{replica.server_address}" for replica in self.replicas]
        with Fleet(addresses, token=os.environ.get("DELTACHAIN_TOKEN", "")) as fleet:
            told = fleet.announce(int(metrics["deltachain/version"]), deadline=deadline_s)
        if not told.enough:
            raise errors.ControlPlaneError(f"{told}: {dict(told.trouble)}")
        ray.get([one.server_handle.set_global_steps.remote(step) for one in self.replicas])
        return metrics
