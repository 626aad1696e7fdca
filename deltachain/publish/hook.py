"""Publishing after every optimizer step, attached by one line to a training loop or trainer."""

# ruff: noqa: ANN401 - settings are the fields of PublishConfig

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from torch import nn

from deltachain.errors import ConfigError
from deltachain.publish.at_exit import close_at_exit
from deltachain.publish.config import PublishConfig
from deltachain.publish.flight import check_every_steps
from deltachain.publish.optimizer_steps import (
    OptimizerSteps,
    check_optimizers,
    say_averaged,
    unwrap_optimizers,
)
from deltachain.publish.publisher import Publisher

if TYPE_CHECKING:
    from transformers import Trainer

    from deltachain.publish.integrations.hf_trainer import DeltaChainCallback


@dataclass(frozen=True, slots=True)
class Attachment:
    """A publisher triggered by the optimizers of a model.

    Attributes:
        publisher: The publisher, for its version or to wait on it.
    """

    publisher: Publisher
    _steps: OptimizerSteps

    def detach(self) -> None:
        """Commit the last version, and stop publishing.

        Changes since then are a version too: steps that ``every_steps`` left out, a state that was
        loaded. They are not while an error is handled or after a step that raised one, which may be
        half in the weights.
        """
        self._steps.remove()
        try:
            if sys.exception() is None and not self._steps.is_broken:
                self.publisher.publish_rest(step=self._steps.count)
        finally:
            self.publisher.close()


@overload
def attach(
    model: Trainer,
    *,
    url: str,
    every_steps: int = 1,
    config: PublishConfig | None = None,
    **settings: Any,
) -> DeltaChainCallback: ...


@overload
def attach(
    model: nn.Module,
    optimizer: object,
    *,
    url: str,
    every_steps: int = 1,
    config: PublishConfig | None = None,
    **settings: Any,
) -> Attachment: ...


def attach(
    model: nn.Module | Trainer,
    optimizer: object = None,
    *,
    url: str,
    every_steps: int = 1,
    config: PublishConfig | None = None,
    **settings: Any,
) -> Attachment | DeltaChainCallback:
    """Publish a model after every step of its optimizer or trainer.

    Each diff is taken against the last published bits, so other changes to the weights, and several
    optimizer steps between two versions, are included; those between a step and the next one are in
    the version of the next one. A step of the model by an optimizer that was not given is refused
    before it begins. With several ranks, call this on each rank, after the model is wrapped.

    Args:
        model: Model on any device, wrapped or not; or a trainer of transformers or TRL, which gets
            a callback.
        optimizer: The torch optimizer of all parameters that require a gradient, or a list of
            several, of which all step for each version; also in wrappers of Accelerate and
            Lightning Fabric. None with a trainer.
        url: Location of the chain.
        every_steps: Number of optimizer steps for each version.
        config: All settings; ``url`` replaces the one in it.
        settings: Single settings, as fields of :class:`PublishConfig`.

    Raises:
        ConfigError: ``optimizer`` is not an optimizer, or that of another model, or leaves out a
            parameter that requires a gradient; or the model cannot be published.

    Examples:
        >>> attachment = deltachain.attach(model, optimizer, url=new_url)
        >>> train_step(model, optimizer)     # calls optimizer.step(), which publishes version 1
        >>> attachment.detach()              # waits for the commit
        >>> attachment.publisher.last.version
        1
        >>> callback = deltachain.attach(trainer, url="/mnt/policy")    # doctest: +SKIP
    """
    if not isinstance(model, nn.Module):
        if not hasattr(model, "add_callback"):
            raise ConfigError(
                f"a {type(model).__name__} is neither a module nor a trainer of transformers",
                hint="attach(model, optimizer, url=...); a function that yields tensors goes to "
                "Publisher(url).attach",
            )
        from deltachain.publish.integrations.hf_trainer import DeltaChainCallback  # noqa: PLC0415 - needs it

        callback = DeltaChainCallback(url, every_steps=every_steps, config=config, **settings)
        model.add_callback(callback.bind(model))
        return callback
    check_every_steps(every_steps)
    optimizers = unwrap_optimizers(optimizer)
    check_optimizers(model, optimizers)
    say_averaged(optimizers)
    publisher = Publisher(PublishConfig.at(url, config, **settings))
    publisher.attach(model, common={"every_steps": every_steps})

    def after_step(count: int) -> None:
        if count % every_steps == 0:
            steps.check()
            publisher.publish(step=count)

    warns = publisher.config.on_error == "warn"
    stopped = publisher.totals.stop
    steps = OptimizerSteps(model, optimizers, after_step, stopped=stopped, warns=warns)
    attachment = Attachment(publisher, steps)
    close_at_exit(publisher, attachment.detach)
    return attachment
