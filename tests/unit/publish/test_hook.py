import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD, AdamW

from deltachain.errors import ConfigError
from deltachain.publish import PublishConfig, attach
from deltachain.publish.hook import unwrap_optimizers
from deltachain.store import FileStore
from tests.support.models import State, bits_of, plain_model, recompute, same
from tests.unit.publish.chains import served


class Training:
    """A model of which each step of its optimizers, unless it fails, is published."""

    def __init__(self, chain: Path, model: nn.Module, optimizer: Any, **settings: Any) -> None:
        self.chain, self.model, self.optimizer = chain, model, optimizer
        settings = {"when_busy": "wait"} | settings
        self.attachment = attach(model, optimizer, url=str(chain), **settings)
        self.publisher, self.detach = self.attachment.publisher, self.attachment.detach

    def step(self, *seeds: int) -> None:
        for seed in seeds:
            step(self.model, self.optimizer, seed)

    def published(self) -> dict[int | None, State]:
        """The versions by their steps, in their order."""
        found = recompute(FileStore(self.chain)).values()
        return {one.committed.manifest.step: one.state for one in found}

    def newest_is(self, bits: State) -> bool:
        *_, newest = self.published().values()
        return same(newest, bits)


Hook: TypeAlias = Callable[..., Training]
Begin: TypeAlias = Callable[..., Training]


@pytest.fixture
def hook(tmp_path: Path) -> Iterator[Hook]:
    made: list[Training] = []

    def build(model: nn.Module, optimizer: object, **settings: Any) -> Training:
        made.append(Training(tmp_path / "chain", model, optimizer, **settings))
        return made[-1]

    yield build
    for training in made:
        training.attachment._steps.remove()
        training.publisher.close()


@pytest.fixture
def begin(hook: Hook) -> Begin:
    """Train a model by one optimizer."""

    def build(kind: Callable[..., Any] = SGD, **settings: Any) -> Training:
        model = fp32_model()
        return hook(model, kind(model.parameters(), lr=0.1), **settings)

    return build


def fp32_model() -> nn.Module:
    return plain_model(dtype=torch.float32)


def backward(model: nn.Module, seed: int) -> None:
    model.zero_grad()
    torch.manual_seed(seed)
    model(torch.randn(4, 24)).square().mean().backward()


def step(model: nn.Module, optimizer: Any, seed: int) -> None:
    backward(model, seed)
    optimizer.step()


def sgd(*parameters: nn.Parameter) -> SGD:
    return SGD(parameters, lr=0.1)


@torch.no_grad()
def clamp_(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.01, 0.01)


class Masters:
    """As DeepSpeed's and Megatron's: its masters go into the model when its step is over."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
        self.optimizer = SGD(self.masters, lr=0.1)


class Fused(SGD):
    """As LOMO: ``backward`` changes each weight as soon as its gradient is there."""

    def fused_backward(self, loss: Tensor, lr: float) -> None:
        raise AssertionError((loss, lr))


REFUSED: dict[str, tuple[Callable[[nn.Module], tuple[Any, Any]], str, str]] = {
    "no optimizer": (lambda model: (model, object()), "no torch optimizer", "Publisher.publish"),
    "of another model": (
        lambda model: (model, SGD(fp32_model().parameters())),
        "SGD has no parameter of this model",
        "Publisher.publish",
    ),
    "nothing": (
        lambda model: (model, None),
        "attach needs the optimizer",
        "attach(model, optimizer, url=...), or Publisher(url).attach(model)",
    ),
    "swapped": (
        lambda model: (SGD(model.parameters()), model),
        "SGD is neither a module nor a trainer",
        "attach(model, optimizer",
    ),
    "one of several": (
        lambda model: (model, SGD([next(model.parameters())])),
        "requires a gradient, and no optimizer",
        "attach(model, [one, other], url=...)",
    ),
    "one that steps inside backward": (
        lambda model: (model, Fused(model.parameters())),
        "Fused changes weights in its fused_backward",
        "Publisher(url).attach",
    ),
    "a wrapper that may change weights after the step": (
        lambda model: (model, Masters(model)),
        "Masters wraps an optimizer",
        "Publisher.publish",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_attached_is_refused(hook: Hook, tmp_path: Path, case: str) -> None:
    given, why, hint = REFUSED[case]
    with pytest.raises(ConfigError, match=why) as caught:
        hook(*given(fp32_model()))
    assert all(part in caught.value.hint for part in hint.split(", or "))
    assert not (tmp_path / "chain").exists()


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as in its reference: two passes, and an optimizer inside."""

    def __init__(self, params: Any, lr: float, radius: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})
        self.radius = radius
        self.base_optimizer = SGD(self.param_groups, lr=lr)
        self.old: dict[Any, Any] = {}

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.old[p] = p.data.clone()
                p.add_(p.grad, alpha=self.radius)

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.old[p]
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


# Each gives what is attached, and what makes one step of it.

Attached: TypeAlias = tuple[nn.Module, Any, Callable[[int], None]]
Way: TypeAlias = Callable[[nn.Module], Attached]


def of_one_optimizer(model: nn.Module) -> Attached:
    optimizer = sgd(*model.parameters())
    return model, optimizer, lambda seed: step(model, optimizer, seed)


def of_all_that_is_trained(model: nn.Module) -> Attached:
    first, *others = model.parameters()
    for parameter in others:
        parameter.requires_grad = False
    optimizer = sgd(first)
    return model, optimizer, lambda seed: step(model, optimizer, seed)


def by_accelerate(model: nn.Module) -> Attached:
    wrapped, optimizer = Accelerator(cpu=True).prepare(model, sgd(*model.parameters()))
    assert type(optimizer).__name__ == "AcceleratedOptimizer"
    assert isinstance(unwrap_optimizers(optimizer)[0], SGD)
    return wrapped, optimizer, lambda seed: step(wrapped, optimizer, seed)


def inside_backward(model: nn.Module) -> Attached:
    mine = {parameter: sgd(parameter) for parameter in model.parameters()}
    for parameter, one in mine.items():
        parameter.register_post_accumulate_grad_hook(lambda _, one=one: one.step())
    return model, list(mine.values()), lambda seed: backward(model, seed)


def with_a_step_inside(model: nn.Module) -> Attached:
    optimizer = Sam(model.parameters(), lr=0.1)

    def both(seed: int) -> None:
        backward(model, seed)
        optimizer.step(lambda: backward(model, seed))

    return model, optimizer, both


def compiled(model: nn.Module) -> Attached:
    optimizer = AdamW(model.parameters(), lr=0.1)
    fast = torch.compile(optimizer.step, backend="eager")

    def one(seed: int) -> None:
        backward(model, seed)
        fast()

    return model, optimizer, one


def in_orders(*orders: str) -> Way:
    """Two optimizers, Muon and AdamW, step in an order, another one each time."""

    def way(model: nn.Module) -> Attached:
        first, *others = model.parameters()
        muon: Any = getattr(torch.optim, "Muon", SGD)  # torch 2.9 has it
        optimizers = {"a": muon([first], lr=0.1), "b": AdamW(others, lr=0.1)}

        def one(seed: int) -> None:
            backward(model, seed)
            for name in orders[seed]:
                optimizers[name].step()

        return model, list(optimizers.values()), one

    return way


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch's own
@pytest.mark.parametrize(
    "way",
    [
        of_one_optimizer,
        of_all_that_is_trained,
        by_accelerate,
        inside_backward,
        with_a_step_inside,
        pytest.param(compiled, marks=pytest.mark.full),
        pytest.param(in_orders("ab", "ba", "ab"), id="ab ba ab"),
        pytest.param(in_orders("ba", "ab", "ab"), id="ba ab ab"),
        pytest.param(in_orders("aab", "aab", "aab"), id="aab aab aab"),
    ],
)
def test_every_step_is_a_version_once_each_optimizer_has_stepped(hook: Hook, way: Way) -> None:
    model = fp32_model()
    given, optimizers, one_step = way(model)
    training = hook(given, optimizers)
    truth: dict[int | None, State] = {None: bits_of(model)}
    for seed in range(3):
        one_step(seed)
        truth[seed + 1] = bits_of(model)
    training.detach()
    found = training.published()
    assert list(found) == list(truth)
    assert all(same(found[number], truth[number]) for number in truth)


# Steps that are no version


@pytest.mark.parametrize("every_steps", ["2", 1.5, True, 0])
def test_every_steps_is_a_whole_number(begin: Begin, every_steps: Any) -> None:
    with pytest.raises(ConfigError, match=r"every_steps=.*expected 1 or more"):
        begin(every_steps=every_steps)


@pytest.mark.parametrize(("every_steps", "when_busy"), [(2, "wait"), (1, "cover")])
def test_detaching_publishes_the_steps_since_the_last_version_and_no_later_ones(
    begin: Begin, every_steps: int, when_busy: str
) -> None:
    training = begin(every_steps=every_steps, when_busy=when_busy)
    training.step(0, 1, 2)
    truth = bits_of(training.model)
    training.detach()
    training.step(3)
    steps = list(training.published())
    assert steps == [None, 2, 3] if every_steps == 2 else steps[-1] == 3
    assert training.newest_is(truth)
    assert not same(bits_of(training.model), truth)


def test_settings_are_those_of_the_configuration_but_for_others_that_are_given(
    begin: Begin,
) -> None:
    config = PublishConfig(url="memory://replaced", encoding="raw", metadata={"run": "a"})
    training = begin(config=config, metadata={"run": "b"})
    training.step(0)
    training.detach()
    first, second = recompute(FileStore(training.chain)).values()
    assert first.committed.manifest.metadata == second.committed.manifest.metadata == {"run": "b"}
    assert set(second.committed.manifest.edge.encodings) <= {"raw", "plain"}


def test_detaching_publishes_a_state_that_was_loaded_after_the_last_step(begin: Begin) -> None:
    training = begin()
    best = copy.deepcopy(training.model.state_dict())
    training.step(0)
    training.model.load_state_dict(best)
    training.detach()
    assert training.newest_is(bits_of(best))


def test_detaching_while_an_error_is_handled_publishes_no_more(begin: Begin) -> None:
    training = begin(every_steps=2)
    training.step(0)
    with contextlib.suppress(ZeroDivisionError):
        try:
            _ = 1 / 0
        finally:
            training.detach()
    assert training.publisher.version == 0


def replaced(model: nn.Module) -> Any:
    return AdamW(model.parameters(), lr=0.1)


def prepared_again(model: nn.Module) -> Any:
    return Accelerator(cpu=True).prepare(sgd(*model.parameters()))


@pytest.mark.parametrize("change", [replaced, prepared_again])
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_the_first_step_of_an_optimizer_that_was_not_given_is_told(
    begin: Begin, caplog: pytest.LogCaptureFixture, change: Callable[..., Any], on_error: str
) -> None:
    training, told = begin(on_error=on_error), "which attach was not given, steps the model"
    training.step(0)
    training.optimizer = change(training.model)
    before = bits_of(training.model)
    if on_error == "raise":
        with pytest.raises(ConfigError, match=told):
            training.step(1)
        assert same(bits_of(training.model), before)
    else:
        training.step(1, 2)
        assert caplog.text.count(told) == 1
    training.detach()
    assert training.newest_is(bits_of(training.model))


def test_an_optimizer_whose_parameters_are_no_longer_those_of_the_model_is_told(
    begin: Begin,
) -> None:
    training = begin()
    training.step(0)
    for module in training.model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    with pytest.raises(ConfigError, match="SGD has no parameter of this model"):
        training.optimizer.step()


def test_the_inner_optimizer_of_a_step_in_two_calls_is_told(begin: Begin) -> None:
    training = begin(Sam)
    get_optimizer_state_dict(training.model, training.optimizer.base_optimizer)  # a step of rate 0
    backward(training.model, 0)
    training.optimizer.first_step()
    with pytest.raises(ConfigError, match="SGD steps the model outside of a step of Sam") as caught:
        training.optimizer.second_step()
    assert "call its publish yourself" in caught.value.hint


def test_the_outer_optimizer_of_a_given_one_is_refused_before_its_step(hook: Hook) -> None:
    model = fp32_model()
    optimizer = Sam(model.parameters(), lr=0.1)
    training = hook(model, optimizer.base_optimizer)
    with pytest.raises(ConfigError, match="Sam, which attach was not given"):
        optimizer.step()
    assert list(training.published()) == [None]


class Clipped(SGD):
    """An optimizer that changes the weights once more after the step that it inherits."""

    fails = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if self.fails:
            raise ValueError("half a step")
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.clamp_(-0.01, 0.01)


def test_what_a_step_does_after_the_one_it_inherits_is_part_of_it_and_a_failed_one_is_not(
    begin: Begin,
) -> None:
    sgd(*fp32_model().parameters())  # torch adds hooks to a class when the first of it is made
    training = begin(Clipped)

    def fail(seed: int) -> None:
        training.optimizer.fails = True
        with pytest.raises(ValueError, match="half a step"):
            training.step(seed)
        training.optimizer.fails = False

    fail(0)
    training.publisher.flush()
    assert training.publisher.version == 0
    training.step(1)
    truth = bits_of(training.model)
    fail(2)
    training.detach()
    assert list(training.published()) == [None, 1]
    assert training.newest_is(truth)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch's own
def test_a_step_compiled_as_one_graph_says_what_to_do(begin: Begin) -> None:
    training = begin()
    backward(training.model, 0)
    torch.compiler.reset()  # it skips what an earlier compilation could not trace
    one_graph: Any = torch.compile(training.optimizer.step, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"deltachain publishes .* compile the step without"):
        one_graph()


# What is told


@pytest.mark.parametrize("which", ["another", "one of two", "of a copy"])
def test_a_publisher_whose_optimizers_bring_no_version_is_not_ready(
    which: str, hook: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "deltachain")
    model = fp32_model()
    first, *rest = model.parameters()
    given = [sgd(first), sgd(*rest)] if which == "one of two" else [sgd(first, *rest)]
    other = {
        "another": sgd(first, *rest),
        "one of two": given[0],
        "of a copy": sgd(*copy.deepcopy(model).parameters()),
    }[which]
    hook(model, given, on_error="warn", metrics="127.0.0.1:0", when_busy="cover")
    for several, code in ((given, 200), ([other] * 9, 503), (given, 200)):
        for one in several:
            one.step()
        assert httpx.get(served(caplog) + "/readyz").status_code == code


def test_an_optimizer_that_does_not_step_is_told(
    hook: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    model = fp32_model()
    first, *others = model.parameters()
    one = sgd(first)
    training = hook(model, [one, AdamW(others, lr=0.1)])
    for seed in range(5):
        step(model, one, seed)
    assert caplog.text.count("SGD steps again before 1 of 2 optimizers did") == 1
    training.detach()
    assert training.newest_is(bits_of(model))


@pytest.mark.parametrize("copies", ["both", "optimizer"])
def test_the_steps_of_a_copy_are_told(
    begin: Begin, caplog: pytest.LogCaptureFixture, copies: str
) -> None:
    training = begin()
    if copies == "both":
        training.model, training.optimizer = copy.deepcopy((training.model, training.optimizer))
    else:
        training.optimizer = copy.deepcopy(training.optimizer)
    training.step(0, 1, 2)
    assert caplog.text.count("trains weights of the same shapes as this model's") == 1
    training.detach()
    assert "no step was published: SGD, which attach was given, did not step" in caplog.text


def test_other_models_step_as_they_like_and_are_not_called_copies(
    begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    training, other = begin(), fp32_model()
    its = sgd(*other.parameters())
    step(other, its, 0)
    training.publisher.flush()
    assert training.publisher.version == 0
    for seed in range(3):
        step(other, its, seed)
        training.step(seed)
    training.detach()
    assert "optimizer_steps" not in caplog.text  # the logger of all warnings about steps


@pytest.mark.parametrize("by_hook", [False, True])
def test_weights_that_are_changed_after_a_step_are_told_unless_a_hook_of_it_does(
    begin: Begin, caplog: pytest.LogCaptureFixture, *, by_hook: bool
) -> None:
    training = begin()
    if by_hook:
        training.optimizer.register_step_post_hook(lambda *_: clamp_(training.model))
    for seed in range(3):
        training.step(seed)
        if not by_hook:
            clamp_(training.model)
    told = caplog.text.count("weights were changed after the optimizer's step")
    assert told == (not by_hook)
    training.detach()
    assert training.publisher.version == (3 if by_hook else 4)
    assert training.newest_is(bits_of(training.model))


class Averaged(SGD):
    """As schedule-free optimizers: the weights are others between ``eval`` and ``train``."""

    def eval(self) -> None:
        pass

    def train(self) -> None:
        pass


def test_weights_that_are_not_those_for_evaluation_are_named(
    begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    begin(Averaged)
    assert "Averaged has other weights for evaluation" in caplog.text
