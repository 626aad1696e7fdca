"""One line for a training loop or a trainer: publish after every optimizer step."""

# ruff: noqa: ANN401 - settings are the fields of PublishConfig

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from deltachain.errors import ConfigError
from deltachain.publish.config import PublishConfig
from deltachain.publish.publisher import Publisher

if TYPE_CHECKING:
    from transformers import Trainer

    from deltachain.publish.integrations.hf_trainer import DeltaChainCallback


@dataclass(frozen=True, slots=True)
class Attachment:
    """A publisher that an optimizer triggers.

    Attributes:
        publisher: Wait on it, or ask it for its version.
    """

    publisher: Publisher
    _handle: RemovableHandle

    def detach(self) -> None:
        """Commit the last version, and stop publishing."""
        self._handle.remove()
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
    """Publish a model after every step of its optimizer, or a trainer's after every one of its own.

    The diff is taken against the bits last published, so it does not matter what else changes the
    weights, nor how often the optimizer steps between two versions. On several ranks, call it on
    each, after the model is wrapped.

    Args:
        model: On any device, wrapped or not. Or a trainer of transformers or TRL, which gets a
            callback.
        optimizer: A torch optimizer, or a wrapper of one such as Accelerate's.
        url: Where the chain lies.
        every_steps: Optimizer steps a version.
        config: All settings at once; ``url`` replaces the one in it.
        settings: Single settings, as fields of :class:`PublishConfig`.

    Raises:
        ConfigError: ``optimizer`` is none, or the model cannot be published.

    Example:
        >>> attachment = deltachain.attach(model, optimizer, url=new_url)
        >>> train_step(model, optimizer)     # calls optimizer.step(), which publishes version 1
        >>> attachment.detach()              # waits for the commit
        >>> attachment.publisher.last.version
        1
        >>> callback = deltachain.attach(trainer, url="/mnt/policy")    # doctest: +SKIP
    """
    if not isinstance(model, nn.Module):
        from deltachain.publish.integrations.hf_trainer import DeltaChainCallback  # noqa: PLC0415 - needs it

        callback = DeltaChainCallback(url, every_steps=every_steps, config=config, **settings)
        model.add_callback(callback.bind(model))
        return callback
    if every_steps < 1:
        raise ConfigError(f"every_steps={every_steps}: expected 1 or more")
    inner = unwrap_optimizer(optimizer)
    publisher = Publisher(PublishConfig.at(url, config, **settings)).attach(model)
    steps = 0

    def after_step(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps % every_steps == 0:
            publisher.publish(step=steps)

    return Attachment(publisher, inner.register_step_post_hook(after_step))


def unwrap_optimizer(optimizer: object) -> Optimizer:
    """The torch optimizer inside Accelerate's wrapper.

    That is an Optimizer by class, but lacks the attributes of hooks: registering one raises
    AttributeError although the method exists. Other wrappers (DeepSpeed's, Megatron's) copy
    masters into the model after the inner step: a hook there would see the step before.

    Raises:
        ConfigError: There is none inside, or its wrapper may do more than step.
    """
    while hasattr(optimizer, "optimizer"):
        if type(optimizer).__module__.partition(".")[0] != "accelerate":
            raise ConfigError(
                f"{type(optimizer).__name__} wraps an optimizer, and may change weights after it",
                hint="call Publisher.publish yourself after its step",
            )
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} is no torch optimizer",
            hint="DeepSpeed steps inside its engine: call Publisher.publish yourself after it",
        )
    return optimizer
