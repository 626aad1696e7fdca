"""Weight synchronisation of TRL's ``AsyncGRPOTrainer`` with remote replicas, through a store."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Self

from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from deltachain.control.announce import DEADLINE_S, Announced, Fleet, Wait
from deltachain.control.replica_client import ReplicaClient
from deltachain.errors import ConfigError, DeltaChainError
from deltachain.publish.config import PublishConfig
from deltachain.publish.model.assets import collect_assets
from deltachain.publish.model.kept_files import watched
from deltachain.publish.publisher import Published, Publisher
from deltachain.publish.session import PublishReceipt
from deltachain.types import Version

logger = logging.getLogger(__name__)

SYNCS: Final = "trl.experimental.async_grpo"
"""Package of the callbacks by which the trainer syncs weights and starts its rollouts."""


def skip_gather(trainer: Any) -> None:  # noqa: ANN401 - TRL's, which is experimental
    """Keep the ranks of an ``AsyncGRPOTrainer`` from the gather of each weight in a sync.

    Nothing but this touches a private name of TRL: the method that gathers, on every rank.

    Raises:
        ConfigError: The trainer has no such method.
    """
    if not callable(getattr(trainer, "_streaming_iter", None)):
        import trl  # noqa: PLC0415 - only to name it

        raise ConfigError(
            f"TRL {trl.__version__}: {type(trainer).__name__} has no _streaming_iter, which "
            "gathers the weights of several ranks",
            hint="tested with TRL 1.13 to 1.16; without attach, rank 0 gathers the model",
        )
    trainer._streaming_iter = lambda: iter(())


class DeltaChainWeightTransfer(TrainerCallback):
    """Weight transfer over a store for ``AsyncGRPOTrainer(weight_transfer=...)``.

    The trainer requests a pause before it sends weights; that request is ignored. Engines generate
    during the upload and the staging of a version, and pause only for the swap. ``send_weights``
    returns once the number of engines set by ``wait`` hold the version, so the trainer's version
    number is never ahead of theirs; after ``deadline`` it returns with a warning.

    Args:
        url: Location of the chain.
        engines: Replicas to notify of each version; optional for replicas in follow mode.
        wait: Number of engines to wait for: ``all``, ``quorum`` or ``any``; ``none`` waits neither
            for engines nor for the upload.
        deadline: Longest delay of training by one sync, upload and engines included, in seconds.
        token: ``DELTACHAIN_TOKEN`` of the replicas, or a file of tokens that is read again when it
            changes.
        key: API key of the engines, or a file in the same way.
        config: All settings of the publisher; ``url`` replaces the one in it.
        settings: Single settings, as fields of :class:`PublishConfig`.

    Attributes:
        publisher: The publisher; ``None`` before the first sync.
        receipts: Receipts of the published versions, oldest first.
        announced: Result of the last announcement, if any.

    Examples:
        >>> transfer = deltachain.DeltaChainWeightTransfer(new_url, engines=["http://a:8000"])
        >>> trainer = AsyncGRPOTrainer(model, weight_transfer=transfer)    # doctest: +SKIP
        >>> transfer.attach(trainer)    # doctest: +SKIP
        >>> trainer.train()             # doctest: +SKIP

        Call ``attach`` on every rank; otherwise rank 0 gathers the model.
    """

    def __init__(  # noqa: PLR0913 - each is a setting of its own
        self,
        url: str,
        *,
        engines: Sequence[str | ReplicaClient] = (),
        wait: Wait = "all",
        deadline: float = DEADLINE_S,
        token: str | Path = "",
        key: str | Path = "",
        config: PublishConfig | None = None,
        **settings: Any,  # noqa: ANN401 - the fields of PublishConfig
    ) -> None:
        self.config = PublishConfig.at(url, config, **settings)
        self.publisher: Publisher | None = None
        self.receipts: list[PublishReceipt] = []
        self.announced: Announced | None = None
        self._fleet = Fleet(engines, token=token, key=key)
        self._wait, self._deadline = wait, deadline
        self._trainer: Any = None
        self._step = 0
        self._sent: Iterable[tuple[str, Tensor]] = ()
        self._flight: Published | None = None
        self._check_tokenizer = watched(None)

    @property
    def version(self) -> Version:
        """The newest version of the chain; -1 before the first sync."""
        return self.publisher.version if self.publisher else -1

    def attach(self, trainer: Any) -> Self:  # noqa: ANN401 - TRL's, which is experimental
        """Publish from the trainer's parameters; call this on every rank, before training.

        Each rank then publishes its own shard, under the names of the checkpoint, without a gather:
        as a callback in front of those that sync. Metrics are added to the trainer's log.

        Raises:
            ConfigError: There are several ranks, and this release of TRL is not known.
        """
        if trainer.accelerator.num_processes > 1:
            skip_gather(trainer)
        callbacks = trainer.callback_handler.callbacks
        syncs = (n for n, one in enumerate(callbacks) if type(one).__module__.startswith(SYNCS))
        callbacks.insert(next(syncs, len(callbacks)), self)
        self._trainer = trainer
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Create or continue the chain, on every rank."""
        del args, state, control
        trainer = self._trainer
        tokenizer = getattr(trainer, "processing_class", None)
        model = trainer.accelerator.unwrap_model(trainer.model)
        assets = collect_assets(model, self.config, tokenizer)
        self._check_tokenizer = watched(tokenizer)
        self.publisher = Publisher(self.config).attach(model, assets=assets)

    def on_step_end(self, args: Any, state: TrainerState, *_: object, **__: object) -> None:  # noqa: ANN401 - TRL's
        """Publish the weights that the sync of this step sends, on every rank."""
        if self.publisher is not None and state.global_step % args.weight_sync_steps == 0:
            self._check_tokenizer()
            self._step = state.global_step
            self._flight = self.publisher.publish(step=self._step)

    def init_weight_transfer(self) -> None:
        """Do nothing: the first sync creates the chain."""

    def pause(self) -> None:
        """Do nothing: each engine pauses by itself once the version is staged."""

    def resume(self) -> None:
        """Do nothing; see :meth:`pause`."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Publish the current weights, and announce the version to the engines.

        Raises:
            DeltaChainError: Publishing failed, and ``on_error`` is ``raise``.
        """
        start = time.monotonic()
        if self._trainer is None:
            self._publish_given(iterator)
        elif self.publisher is None:
            raise ConfigError(
                f"{type(self._trainer).__name__} synced before its other callbacks began",
                hint="tested with TRL 1.13 to 1.16; without attach, rank 0 gathers the model",
            )
        if self._wait == "none":
            if self._flight is not None:  # a later version may cover it: announce that one
                self._flight.add_done_callback(self._announce_later)
            else:
                self._announce(self.version, self._wait, 0.0)
        elif self._settle():
            left_s = max(0.0, self._deadline - (time.monotonic() - start))
            self._announce(self.version, self._wait, left_s)
        self._log(time.monotonic() - start)

    def destroy(self) -> None:
        """Commit the remaining changes, announce them to the engines, and release all resources.

        Publishes the weights again after a failed last sync, if this is the only rank. Waits for
        engines as after a sync; with ``wait="none"``, waits for all of them.

        Raises:
            DeltaChainError: Publishing failed, and ``on_error`` is ``raise``.
        """
        publisher, flight = self.publisher, self._flight
        try:
            if publisher is not None:
                publisher.flush()
                # No committed version may include the last sync.
                lost = flight is not None and (not flight.done() or flight.exception() is not None)
                if self._trainer is not None and publisher.is_alone and lost:
                    publisher.publish(step=self._step)
                publisher.close()
                last = self.announced
                if last is None or last.version < self.version or last.stragglers:
                    wait: Wait = "all" if self._wait == "none" else self._wait
                    self._announce(self.version, wait, self._deadline)
        finally:
            self._fleet.close()

    def _publish_given(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Publish weights gathered by the trainer in this process; other ranks have none."""
        if self.publisher is None:
            self._sent = list(iterator)  # attach iterates over it more than once
            publisher = Publisher(self.config)
            self.publisher = publisher.attach(lambda: iter(self._sent), alone=True)
        else:
            self._sent = iterator  # consumed once, one tensor at a time
            self._flight = self.publisher.publish()

    def _settle(self) -> bool:
        """Wait for the upload; return whether there is a version to announce."""
        flight = self._flight
        if flight is None:
            return True
        if not (flight.running() or flight.done()):
            return False  # left to the next sync; the publisher has logged why
        try:
            self._note(flight.result(self._deadline))
        except TimeoutError:
            logger.warning(
                "not uploaded in %g s; training goes on, engines are told then", self._deadline
            )
            flight.add_done_callback(self._announce_later)
            return False
        except DeltaChainError as exc:
            if self.config.on_error == "raise":
                raise
            logger.warning("not published, the next sync makes up for it: %s", exc)
            return False
        return True

    def _note(self, receipt: PublishReceipt) -> bool:
        """Add a receipt, once for all syncs that it covers; return whether it is new."""
        is_new = not self.receipts or self.receipts[-1].version < receipt.version
        if is_new:
            self.receipts.append(receipt)
        return is_new

    def _announce(self, version: Version, wait: Wait, deadline: float) -> None:
        last = self.receipts[-1] if self.receipts else None
        manifest = last.manifest if last and last.version == version else ""
        announced = self.announced = self._fleet.announce(
            version, manifest=manifest, wait=wait, deadline=deadline
        )
        if not announced.enough:
            logger.warning("%s; training goes on", announced)

    def _announce_later(self, flight: Future[PublishReceipt]) -> None:
        """Announce a late version without waiting; called in the publisher's thread."""
        if flight.exception() is None and self._note(flight.result()):
            self._announce(flight.result().version, "none", 0.0)

    def _log(self, sync_s: float) -> None:
        if self._trainer is None:
            return
        figures = self.receipts[-1].metrics() if self.receipts else {}
        figures["deltachain/sync_s"] = sync_s
        if self.announced is not None:
            figures["deltachain/ack_s"] = self.announced.waited_s
            figures["deltachain/stragglers"] = float(len(self.announced.stragglers))
        self._trainer.rollout_worker.metrics_queue.put(figures)
