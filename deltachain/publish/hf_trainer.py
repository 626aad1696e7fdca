"""Callback for the Hugging Face Trainer and every TRL trainer."""

from typing import Any, Self

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from deltachain.publish.config import PublishConfig
from deltachain.publish.hook import say_averaged
from deltachain.publish.model.assets import collect_assets
from deltachain.publish.model.kept_files import watched
from deltachain.publish.publisher import Published, Publisher, check_every_steps
from deltachain.publish.session import PublishReceipt


class DeltaChainCallback(TrainerCallback):
    """Publisher of the model at every step: ``Trainer(..., callbacks=[DeltaChainCallback(url)])``.

    The chain is created or continued at the start of training; the last version is committed before
    training ends. A version has what earlier callbacks did to the weights: give this one last, or
    call ``bind(trainer)``. Metrics are logged in ``state.log_history`` and, once bound, to the
    trainer's reporters. With several ranks, each publishes a part.

    Args:
        url: Location of the chain.
        every_steps: Number of optimizer steps for each version.
        config: All settings; ``url`` replaces the one in it.
        settings: Single settings, as fields of :class:`PublishConfig`.

    Attributes:
        receipts: Receipts of the published versions, oldest first.
        publisher: The publisher during training; otherwise ``None``.

    Examples:
        >>> callback = deltachain.DeltaChainCallback(new_url, every_steps=4)
        >>> trainer = transformers.Trainer(model, callbacks=[callback])    # doctest: +SKIP
    """

    def __init__(
        self,
        url: str,
        *,
        every_steps: int = 1,
        config: PublishConfig | None = None,
        **settings: Any,  # noqa: ANN401 - the fields of PublishConfig
    ) -> None:
        check_every_steps(every_steps)
        self.config = PublishConfig.at(url, config, **settings)
        self.every_steps = every_steps
        self.receipts: list[PublishReceipt] = []
        self.publisher: Publisher | None = None
        self._trainer: Trainer | None = None
        self._futures: list[Published] = []
        self._check_tokenizer = watched(None)

    def bind(self, trainer: Trainer) -> Self:
        """Send metrics to the reporters of a trainer, and become its last callback.

        It takes the place of an earlier callback for the same URL, as of a notebook cell that was
        run before.
        """
        for earlier in list(trainer.callback_handler.callbacks):
            if not isinstance(earlier, DeltaChainCallback) or earlier is self:
                continue
            if earlier.config.url == self.config.url:
                trainer.remove_callback(earlier)
                if earlier.publisher is not None:  # training was interrupted
                    earlier.publisher.close()
        self._trainer = trainer
        return self

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        processing_class: object = None,
        optimizer: object = None,
        **_: object,
    ) -> None:
        """Create or continue the chain; the model is wrapped and its weights are loaded by now."""
        del args, state, control
        if model is None:
            return
        if self._trainer is not None:
            handler = self._trainer.callback_handler  # it goes through its old list meanwhile
            handler.callbacks = [*(one for one in handler.callbacks if one is not self), self]
        say_averaged([getattr(optimizer, "optimizer", optimizer)])
        earlier, self.publisher = self.publisher, None
        if earlier is not None:  # training was interrupted, and is begun again
            earlier.close()
        self.publisher = Publisher(self.config)
        assets = collect_assets(model, self.config, processing_class)
        self._check_tokenizer = watched(processing_class)
        self.publisher.attach(model, assets=assets, common={"every_steps": self.every_steps})

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Publish; the global step includes this step, and a skipped step changes nothing."""
        del control
        if self.publisher is None or state.global_step % self.every_steps:
            return
        self._check_tokenizer()
        self._futures.append(self.publisher.publish(step=state.global_step))
        self._report(args, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Publish what no version has yet, such as the best model loaded at the end; then close."""
        del control
        if self.publisher is None:
            return
        publisher, self.publisher = self.publisher, None
        try:
            self._check_tokenizer()
            publisher.publish_rest(step=state.global_step)
        finally:
            publisher.close()
        self._report(args, state, publisher.last)

    def _report(
        self, args: TrainingArguments, state: TrainerState, last: PublishReceipt | None = None
    ) -> None:
        arrived = [future for future in self._futures if future.done()]
        self._futures = [future for future in self._futures if not future.done()]
        # The publisher raises or logs an error.
        receipts = [future.result() for future in arrived if future.exception() is None]
        for receipt in (*receipts, last):
            if receipt is not None and receipt not in self.receipts:
                self.receipts.append(receipt)
                self._log(receipt.metrics(), args, state)

    def _log(self, metrics: dict[str, float], args: TrainingArguments, state: TrainerState) -> None:
        # TRL averages these into its next log entry. A plain Trainer has no such buffer, and an
        # entry for each version would outnumber its losses unless it logs each step.
        pending = getattr(self._trainer, "_metrics", None)
        if isinstance(pending, dict) and "train" in pending:
            for name, value in metrics.items():
                pending["train"][name].append(value)
        elif self._trainer is not None and state.global_step % max(1, int(args.logging_steps)) == 0:
            self._trainer.log(metrics)
        else:
            state.log_history.append({**metrics, "step": state.global_step})
