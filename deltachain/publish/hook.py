"""Publishing after every optimizer step, attached by one line to a training loop or trainer."""

# ruff: noqa: ANN401 - settings are the fields of PublishConfig
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, cast, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from deltachain.errors import ConfigError, UnsupportedModelError
from deltachain.publish.config import PublishConfig
from deltachain.publish.model.source import TensorSource
from deltachain.publish.publisher import Publisher, check_every_steps, close_at_exit

if TYPE_CHECKING:
    from transformers import Trainer

    from deltachain.publish.hf_trainer import DeltaChainCallback


logger = logging.getLogger(__name__)

_THIN: Final = frozenset({"accelerate", "lightning", "lightning_fabric", "pytorch_lightning"})
"""Packages whose wrappers change no weight after the step that they call."""

_BY_HAND: Final = "or call Publisher.publish yourself after each whole step"

_ALL_OPTIMIZERS: Final = (
    "give attach all optimizers of the model, attach(model, [one, other], url=...)"
)

_MANY: Final = 8
"""Steps of another optimizer of equal shapes, between two of the own, that suggest a copy."""

_GRAPH: Final = (
    "deltachain publishes after each step, which no graph has: compile the step without fullgraph"
)

_ATTACH_COPY: Final = (
    "if it trains a copy of the model, as from copy.deepcopy, detach, and attach the copy and its "
    "optimizer"
)


class OptimizerSteps:
    """Counts the steps of a model's optimizers, and calls ``each`` with the number of each.

    With several optimizers, a step is complete once each has stepped since the last one, in any
    order. Steps inside another step, as in SAM or Lookahead, are part of it. Warnings are logged
    once each; with ``warns``, so is a step that cannot be followed, instead of an error.
    ``stopped`` gets the reason if steps bring no version, and an empty one once they do.
    """

    # torch calls global hooks for each optimizer of the process, also for one that is made later.

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        each: Callable[[int], None],
        *,
        stopped: Callable[[str], None],
        warns: bool,
    ) -> None:
        self.count = 0
        self._model, self._optimizers = model, optimizers
        self._each, self._stopped = each, stopped
        self._warns = warns
        self._told: set[str] = set()
        self._stepped: set[int] = set()
        self._writes: int | None = None
        self._others = 0  # steps of other models' optimizers since the last complete step
        self._outermost: FrameType | None = None
        self.depth = 0  # of steps under way, or in which the newest one raised an error
        self._handles = [
            register_optimizer_step_pre_hook(torch.compiler.disable(self._before, reason=_GRAPH)),
            register_optimizer_step_post_hook(torch.compiler.disable(self._after, reason=_GRAPH)),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._others and not self.count:
            names = ", ".join(type(one).__name__ for one in self._optimizers)
            self._tell(
                f"no step was published: {names}, which attach was given, did not step, and other "
                f"optimizers stepped {self._others} times; {_ATTACH_COPY}"
            )

    def check(self) -> None:
        try:
            check_optimizers(self._model, self._optimizers)
        except ConfigError as error:
            self._refuse(error)

    def _before(self, optimizer: Optimizer, *_: object) -> None:
        if self.depth and _is_running(self._outermost):
            self.depth += 1
            return
        self._outermost, self.depth = None, 0  # an earlier step may have raised an error
        if any(optimizer is one for one in self._optimizers):
            self._outermost, self.depth = _caller(), 1
            self._look(optimizer)
            return
        if not any(group.get("lr", 1) for group in optimizer.param_groups):
            return  # a step that changes nothing makes the state that a checkpoint has
        self._others += 1
        if not _ids(self._model.parameters()).isdisjoint(_ids(_stepped_by([optimizer]))):
            self._refuse_other(optimizer)
        elif self._others > 1 and _shapes([optimizer]) == _shapes(self._optimizers):
            line = (
                f"{type(optimizer).__name__}, which attach was not given, trains weights of "
                f"the same shapes as this model's: they are not published; {_ATTACH_COPY}"
            )
            self._tell(line)
            if self._others >= _MANY:
                self._stopped(line)

    def _refuse_other(self, optimizer: Optimizer) -> None:
        message = f"{type(optimizer).__name__}, which attach was not given, steps the model"
        hint = (
            f"{_ALL_OPTIMIZERS}, and of one that wraps another (SAM, Lookahead) the outer; after "
            f"an optimizer was replaced, detach and attach with the new one; {_BY_HAND}"
        )
        for outer in (one for one in self._optimizers if optimizer in vars(one).values()):
            message = (
                f"{type(optimizer).__name__} steps the model outside of a step of "
                f"{type(outer).__name__}, which holds it: when that one is complete is not known"
            )
            hint = (
                "give Publisher(url).attach the model alone, and call its publish yourself after "
                "each whole step"
            )
        error = UnsupportedModelError(message, hint=hint)
        if self._others > 1:  # at one of each in turn, those that were given publish all changes
            self._stopped(str(error.args[0]))
        self._refuse(error)

    def _look(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._stepped:
            missing = len(self._optimizers) - len(self._stepped)
            self._stepped.clear()
            line = (
                f"{type(optimizer).__name__} steps again before {missing} of "
                f"{len(self._optimizers)} optimizers did: a version follows only once each has "
                f"stepped; for other steps, give Publisher.attach the model, {_BY_HAND[3:]}"
            )
            self._tell(line)
            self._stopped(line)
        if self._writes not in (None, _writes(self._optimizers)):
            self._tell(
                "weights were changed after the optimizer's step: the version of a step does not "
                "have such changes, the next one does; make them in "
                f"optimizer.register_step_post_hook, {_BY_HAND}"
            )

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        if not self.depth:
            return
        self.depth -= 1
        if self.depth:
            return
        self._outermost = None
        self._stepped.add(id(optimizer))
        self._writes = None
        if len(self._stepped) == len(self._optimizers):
            self._stepped.clear()
            self._others = 0
            self._stopped("")
            self.count += 1
            self._each(self.count)
            self._writes = _writes(self._optimizers)

    def _refuse(self, error: ConfigError) -> None:
        if not self._warns:
            raise error
        self._tell(f"steps that are not followed: {error}")

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            logger.warning("%s", line)


class WholeSteps:
    """Calls ``each`` after whole steps of DeepSpeed's engine or Megatron's optimizer.

    These write weights after the optimizer of torch inside them, which has no hook for that, so
    that a method of this one object is replaced.
    """

    def __init__(self, steps: Any, each: Callable[[int], None]) -> None:
        self.count = self.depth = 0
        # A pipeline of DeepSpeed has no other step than a whole batch.
        self._name = "train_batch" if hasattr(type(steps), "train_batch") else "step"
        self._steps = steps
        call, before = getattr(steps, self._name), getattr(steps, "global_steps", 0)

        @wraps(call)
        def step(*args: Any, **kwargs: Any) -> Any:
            self.depth = 1
            result = call(*args, **kwargs)
            self.depth = 0
            count = getattr(steps, "global_steps", before + self.count + 1) - before
            if count > self.count:  # not while an engine accumulates gradients
                self.count = count
                each(count)
            return result

        setattr(steps, self._name, step)

    def remove(self) -> None:
        delattr(self._steps, self._name)


def stepping(model: object, optimizer: object) -> object:
    """Return the engine or optimizer whose ``step`` ends with all weights written, if any."""
    for one, kind in ((model, "DeepSpeedEngine"), (optimizer, "MegatronOptimizer")):
        if any(base.__name__ == kind for base in type(one).__mro__):
            return one
    return None


def say_averaged(optimizers: Iterable[object]) -> None:
    """Log optimizers that train other weights than they evaluate with, as schedule-free ones do."""
    for one in optimizers:
        if callable(getattr(one, "train", None)) and callable(getattr(one, "eval", None)):
            logger.warning(
                "%s has other weights for evaluation: versions have the trained ones; to publish "
                "the others, call its eval(), Publisher.publish, and its train() again",
                type(one).__name__,
            )


def check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    parameters = _ids(model.parameters())
    for optimizer in optimizers:
        if parameters.isdisjoint(_ids(_stepped_by([optimizer]))):
            raise UnsupportedModelError(
                f"{type(optimizer).__name__} has no parameter of this model: its steps do not "
                "train it",
                hint="make the optimizer from model.parameters() once the model is wrapped; for a "
                "copy that something else writes to, such as an average, call Publisher.publish "
                "after that",
            )
    stepped = _ids(_stepped_by(optimizers))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in stepped:
            raise UnsupportedModelError(
                f"{name!r} requires a gradient, and no optimizer given to attach steps it",
                hint=f"{_ALL_OPTIMIZERS}, or call requires_grad_(False) on parameters that are "
                f"not trained; {_BY_HAND}",
            )


def unwrap_optimizers(optimizers: object) -> tuple[Optimizer, ...]:
    """Return the torch optimizers inside wrappers that only call them, and call no hooks.

    Other wrappers (DeepSpeed's, Megatron's) copy master weights into the model after the inner
    step, and a hook there would see the previous step.
    """
    several = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    if optimizers is None or not several:
        raise ConfigError(
            "attach needs the optimizer whose steps it publishes",
            hint="attach(model, optimizer, url=...); without one, Publisher(url).attach(model), "
            "and call its publish after each step",
        )
    return tuple(dict.fromkeys(_unwrapped(one) for one in several))


def _unwrapped(optimizer: object) -> Optimizer:
    while hasattr(optimizer, "optimizer"):
        if type(optimizer).__module__.partition(".")[0] not in _THIN:
            raise UnsupportedModelError(
                f"{type(optimizer).__name__} wraps an optimizer, and may change weights after it",
                hint="call Publisher.publish yourself after its step",
            )
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise UnsupportedModelError(
            f"{type(optimizer).__name__} is no torch optimizer",
            hint="give an optimizer of torch, or a list of several; of DeepSpeed, the "
            f"engine alone: attach(engine, url=...); {_BY_HAND}",
        )
    if hasattr(optimizer, "fused_backward"):  # as LOMO, also in pytorch_optimizer
        raise UnsupportedModelError(
            f"{type(optimizer).__name__} changes weights in its fused_backward, and has no steps",
            hint="give Publisher(url).attach the model, and call its publish after each of them",
        )
    return optimizer


def _shapes(optimizers: Sequence[Optimizer]) -> list[tuple[int, ...]]:
    return sorted(tuple(parameter.shape) for parameter in _stepped_by(optimizers))


def _writes(optimizers: Sequence[Optimizer]) -> int:
    """Return how often the parameters of some optimizers were written to; not through ``.data``."""
    return sum(one._version for one in _stepped_by(optimizers) if not one.is_inference())


def _stepped_by(optimizers: Sequence[Optimizer]) -> Iterator[nn.Parameter]:
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return (parameter for group in groups for parameter in group["params"])


def _ids(parameters: Iterable[nn.Parameter]) -> set[int]:
    return set(map(id, parameters))


def _caller() -> FrameType | None:
    """Return the frame of the step that calls a hook, outside what ``torch.compiler`` adds."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and "_dynamo" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame


def _is_running(frame: FrameType | None) -> bool:
    at: FrameType | None = sys._getframe()
    while at is not None and at is not frame:
        at = at.f_back
    return at is not None


@dataclass(frozen=True, slots=True)
class Attachment:
    """A publisher triggered by the optimizers of a model.

    Attributes:
        publisher: The publisher, for its version or to wait on it.
    """

    publisher: Publisher
    _steps: OptimizerSteps | WholeSteps

    def detach(self) -> None:
        """Commit the last version, and stop publishing.

        Changes since then are a version too: steps that ``every_steps`` left out, a state that was
        loaded. They are not while an error is handled or after a step that raised one, which may be
        half in the weights.
        """
        self._steps.remove()
        try:
            if sys.exception() is None and not self._steps.depth:
                self.publisher.publish_rest(step=self._steps.count)
        finally:
            self.publisher.close()


@overload
def attach(
    model: "Trainer",
    *,
    url: str,
    every_steps: int = 1,
    config: PublishConfig | None = None,
    **settings: Any,
) -> "DeltaChainCallback": ...


@overload
def attach(
    model: nn.Module | TensorSource,
    optimizer: object = None,
    *,
    url: str,
    every_steps: int = 1,
    config: PublishConfig | None = None,
    **settings: Any,
) -> Attachment: ...


def attach(
    model: "nn.Module | TensorSource | Trainer",
    optimizer: object = None,
    *,
    url: str,
    every_steps: int = 1,
    config: PublishConfig | None = None,
    **settings: Any,
) -> "Attachment | DeltaChainCallback":
    """Publish a model after every step of its optimizer or trainer.

    Each diff is taken against the last published bits, so other changes to the weights, and several
    optimizer steps between two versions, are included; those between a step and the next one are in
    the version of the next one. A step of the model by an optimizer that was not given is refused
    before it begins. With several ranks, call this on each rank, after the model is wrapped.

    Args:
        model: Model on any device, wrapped or not; an engine of DeepSpeed, which steps itself; or a
            trainer of transformers or TRL, which gets a callback. Or an export, with Megatron's
            optimizer.
        optimizer: The torch optimizer of all parameters that require a gradient, or a list of
            several, of which all step for each version; also in wrappers of Accelerate and
            Lightning Fabric. None with an engine or a trainer.
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
    outer, subject = stepping(model, optimizer), cast("Any", model)
    if outer is None and not isinstance(model, nn.Module):
        if not hasattr(model, "add_callback"):
            raise ConfigError(
                f"a {type(model).__name__} is neither a module nor a trainer of transformers",
                hint="attach(model, optimizer, url=...); a function that yields tensors goes to "
                "Publisher(url).attach",
            )
        from deltachain.publish.hf_trainer import DeltaChainCallback  # noqa: PLC0415 - needs it

        callback = DeltaChainCallback(url, every_steps=every_steps, config=config, **settings)
        subject.add_callback(callback.bind(subject))
        return callback
    check_every_steps(every_steps)
    optimizers: tuple[Optimizer, ...] = ()
    if outer is None:
        optimizers = unwrap_optimizers(optimizer)
        check_optimizers(subject, optimizers)
        say_averaged(optimizers)
    publisher = Publisher(PublishConfig.at(url, config, **settings))
    publisher.attach(subject, common={"every_steps": every_steps})

    def after_step(count: int) -> None:
        if count % every_steps == 0:
            if isinstance(steps, OptimizerSteps):
                steps.check()
            publisher.publish(step=count)

    warns = publisher.config.on_error == "warn"
    stopped = partial(setattr, publisher.totals, "stopped")
    steps: OptimizerSteps | WholeSteps
    if outer is None:
        steps = OptimizerSteps(subject, optimizers, after_step, stopped=stopped, warns=warns)
    else:
        steps = WholeSteps(outer, after_step)
    attachment = Attachment(publisher, steps)
    close_at_exit(publisher, attachment.detach)
    return attachment
