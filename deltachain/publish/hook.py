"""Publishing after every optimizer step, attached by one line to a training loop or trainer."""

# ruff: noqa: ANN401 - settings are the fields of PublishConfig

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from deltachain.errors import ConfigError
from deltachain.publish.config import PublishConfig
from deltachain.publish.flight import check_every_steps
from deltachain.publish.publisher import Publisher

if TYPE_CHECKING:
    from transformers import Trainer

    from deltachain.publish.integrations.hf_trainer import DeltaChainCallback


@dataclass(frozen=True, slots=True)
class Attachment:
    """A publisher triggered by an optimizer.

    Attributes:
        publisher: The publisher, for its version or to wait on it.
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
    """Publish a model after every step of its optimizer or trainer.

    Each diff is taken against the last published bits, so other changes to the weights, and several
    optimizer steps between two versions, are included. With several ranks, call this on each rank,
    after the model is wrapped.

    Args:
        model: Model on any device, wrapped or not; or a trainer of transformers or TRL, which gets
            a callback.
        optimizer: A torch optimizer of some or all of the model's parameters, or a wrapper of one
            such as Accelerate's; none with a trainer.
        url: Location of the chain.
        every_steps: Number of optimizer steps for each version.
        config: All settings; ``url`` replaces the one in it.
        settings: Single settings, as fields of :class:`PublishConfig`.

    Raises:
        ConfigError: ``optimizer`` is not an optimizer, or that of another model, or the model
            cannot be published.

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
    inner = unwrap_optimizer(optimizer)
    _check_same(model, inner)
    publisher = Publisher(PublishConfig.at(url, config, **settings))
    publisher.attach(model, common={"every_steps": every_steps})
    steps = 0

    def after_step(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps % every_steps == 0:
            publisher.publish(step=steps)

    return Attachment(publisher, inner.register_step_post_hook(after_step))


def _check_same(model: nn.Module, optimizer: Optimizer) -> None:
    """Check that the optimizer changes at least one parameter of the model."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in stepped for parameter in model.parameters()):
        raise ConfigError(
            f"{type(optimizer).__name__} has no parameter of this model: its steps do not train it",
            hint="make the optimizer from model.parameters() once the model is wrapped; for a copy "
            "that something else writes to, such as an average, call Publisher.publish after that",
        )


def unwrap_optimizer(optimizer: object) -> Optimizer:
    """Return the torch optimizer inside Accelerate's wrapper.

    The wrapper is an Optimizer by class but lacks the attributes of hooks, so that registering one
    raises AttributeError. Other wrappers (DeepSpeed's, Megatron's) copy master weights into the
    model after the inner step: a hook there would see the previous step.

    Raises:
        ConfigError: There is no torch optimizer inside, or the wrapper may do more than step.
    """
    if optimizer is None:
        raise ConfigError(
            "attach needs the optimizer whose steps it publishes",
            hint="attach(model, optimizer, url=...); without one, Publisher(url).attach(model), "
            "and call its publish after each step",
        )
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
