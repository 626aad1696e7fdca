import contextlib
import copy
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import SGD, AdamW

from deltachain.errors import ConfigError
from deltachain.publish import Attachment, PublishConfig, attach
from deltachain.publish.hook import unwrap_optimizers
from deltachain.store import FileStore
from tests.support.models import Recomputed, State, bits_of, plain_model, recompute, same

Hook = Callable[..., Attachment]


@pytest.fixture
def hook(tmp_path: Path) -> Iterator[Hook]:
    made: list[Attachment] = []

    def build(model: nn.Module, optimizer: object, **settings: Any) -> Attachment:
        made.append(attach(model, optimizer, url=str(tmp_path / "chain"), **settings))
        return made[-1]

    yield build
    for attachment in made:
        attachment._steps.remove()
        attachment.publisher.close()


def versions(tmp_path: Path) -> dict[int, Recomputed]:
    return recompute(FileStore(tmp_path / "chain"))


def fp32_model() -> nn.Module:
    return plain_model(dtype=torch.float32)


def step(model: nn.Module, optimizer: Any, seed: int) -> None:
    backward(model, seed)
    optimizer.step()
    optimizer.zero_grad()


def backward(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, 24)).square().mean().backward()


def assert_published(tmp_path: Path, truth: Sequence[State]) -> None:
    """The versions after the first are these states."""
    found = versions(tmp_path)
    assert len(found) == 1 + len(truth)
    assert all(same(found[v].state, bits) for v, bits in enumerate(truth, start=1))


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
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_attached_is_refused(hook: Hook, tmp_path: Path, case: str) -> None:
    given, why, hint = REFUSED[case]
    with pytest.raises(ConfigError, match=why) as caught:
        hook(*given(fp32_model()))
    assert all(part in caught.value.hint for part in hint.split(", or "))
    assert not (tmp_path / "chain").exists()


def test_an_optimizer_of_all_that_is_trained_will_do(hook: Hook, tmp_path: Path) -> None:
    model = fp32_model()
    first, *others = model.parameters()
    for parameter in others:
        parameter.requires_grad = False
    optimizer = SGD([first], lr=0.1)
    attachment = hook(model, optimizer, when_busy="wait")
    step(model, optimizer, 0)
    attachment.publisher.flush()
    assert same(versions(tmp_path)[1].state, bits_of(model))


@pytest.mark.parametrize("every_steps", ["2", 1.5, True, 0])
def test_every_steps_is_a_whole_number(hook: Hook, every_steps: Any) -> None:
    model = fp32_model()
    with pytest.raises(ConfigError, match=r"every_steps=.*expected 1 or more"):
        hook(model, SGD(model.parameters()), every_steps=every_steps)


def test_every_optimizer_step_is_a_version(hook: Hook, tmp_path: Path) -> None:
    model = fp32_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    attachment = hook(model, optimizer, when_busy="wait")
    truth = [bits_of(model)]
    for seed in range(3):
        step(model, optimizer, seed)
        truth.append(bits_of(model))
    attachment.publisher.flush()
    found = versions(tmp_path)
    assert [found[v].committed.manifest.step for v in found] == [None, 1, 2, 3]
    assert all(same(found[v].state, truth[v]) for v in found)


def test_detaching_commits_what_was_published_and_stops(hook: Hook, tmp_path: Path) -> None:
    model = fp32_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    attachment = hook(model, optimizer)
    for seed in range(3):
        step(model, optimizer, seed)
    truth = bits_of(model)
    attachment.detach()
    step(model, optimizer, 3)
    found = versions(tmp_path)
    assert same(found[max(found)].state, truth)
    assert not same(bits_of(model), truth)


def test_detaching_publishes_the_steps_since_the_last_version(hook: Hook, tmp_path: Path) -> None:
    model = fp32_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    config = PublishConfig(url="memory://replaced", when_busy="wait")
    attachment = hook(model, optimizer, every_steps=2, config=config, metadata={"run": "b"})
    for seed in range(3):
        step(model, optimizer, seed)
    attachment.detach()
    found = versions(tmp_path)
    manifests = [found[v].committed.manifest for v in found]
    assert [(m.step, m.metadata["run"]) for m in manifests] == [(None, "b"), (2, "b"), (3, "b")]
    assert same(found[2].state, bits_of(model))


def test_detaching_publishes_a_state_that_was_loaded_after_the_last_step(
    hook: Hook, tmp_path: Path
) -> None:
    model = fp32_model()
    best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = SGD(model.parameters(), lr=0.1)
    attachment = hook(model, optimizer)
    step(model, optimizer, 0)
    model.load_state_dict(best)
    attachment.detach()
    found = versions(tmp_path)
    assert same(found[max(found)].state, bits_of(model))
    assert same(found[max(found)].state, found[0].state)


def test_detaching_while_an_error_is_handled_publishes_no_more(hook: Hook) -> None:
    model = fp32_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    attachment = hook(model, optimizer, every_steps=2)
    step(model, optimizer, 0)
    with contextlib.suppress(ZeroDivisionError):
        try:
            _ = 1 / 0
        finally:
            attachment.detach()
    assert attachment.publisher.version == 0


def test_accelerate_is_unwrapped(hook: Hook, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = fp32_model()
    wrapped, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    assert type(optimizer).__name__ == "AcceleratedOptimizer"
    assert isinstance(unwrap_optimizers(optimizer)[0], SGD)
    attachment = hook(wrapped, optimizer, when_busy="wait")
    for seed in range(2):
        step(wrapped, optimizer, seed)
    attachment.publisher.flush()
    found = versions(tmp_path)
    assert max(found) == 2
    assert same(found[2].state, bits_of(model))


def test_a_wrapper_that_may_change_weights_after_the_step_is_refused(hook: Hook) -> None:
    """As DeepSpeed's and Megatron's do: their masters go into the model when it is over."""

    class Masters:
        def __init__(self, model: nn.Module) -> None:
            self.model = model
            self.masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
            self.optimizer = SGD(self.masters, lr=0.1)

    model = fp32_model()
    with pytest.raises(ConfigError, match="Masters wraps an optimizer") as caught:
        hook(model, Masters(model))
    assert "Publisher.publish" in caught.value.hint


__all__ = ["hook"]  # a fixture


def test_one_optimizer_of_several_is_refused_before_anything_is_committed(
    hook: Hook, tmp_path: Path
) -> None:
    model = fp32_model()
    with pytest.raises(ConfigError, match="requires a gradient, and no optimizer") as caught:
        hook(model, SGD([next(model.parameters())]))
    assert "attach(model, [one, other], url=...)" in caught.value.hint
    assert not (tmp_path / "chain").exists()


def test_optimizers_that_step_inside_backward_make_one_version_a_step(
    hook: Hook, tmp_path: Path
) -> None:
    model = fp32_model()
    mine = {parameter: SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step_it(parameter: Any) -> None:
        mine[parameter].step()
        parameter.grad = None

    for parameter in mine:
        parameter.register_post_accumulate_grad_hook(step_it)
    attachment = hook(model, list(mine.values()), when_busy="wait")
    truth = []
    for seed in range(3):
        backward(model, seed)
        truth.append(bits_of(model))
    attachment.detach()
    assert_published(tmp_path, truth)


@pytest.mark.parametrize("orders", [("ab", "ba", "ab"), ("ba", "ab", "ab"), ("aab", "aab")])
def test_a_version_follows_once_each_optimizer_has_stepped(
    hook: Hook, tmp_path: Path, orders: tuple[str, ...]
) -> None:
    model = fp32_model()
    first, *others = model.parameters()
    optimizers = {"a": SGD([first], lr=0.1), "b": AdamW(others, lr=0.1)}
    attachment = hook(model, list(optimizers.values()), when_busy="wait")
    truth = []
    for seed, order in enumerate(orders):
        backward(model, seed)
        for name in order:
            optimizers[name].step()
        truth.append(bits_of(model))
        model.zero_grad()
    attachment.detach()
    assert_published(tmp_path, truth)


def replaced(model: nn.Module, optimizer: Any) -> Any:
    del optimizer
    return AdamW(model.parameters(), lr=0.1)


def prepared_again(model: nn.Module, optimizer: Any) -> Any:
    del optimizer
    return Accelerator(cpu=True).prepare(SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("change", [replaced, prepared_again])
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_the_first_step_of_an_optimizer_that_was_not_given_is_told(
    hook: Hook,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[..., Any],
    on_error: str,
) -> None:
    model = fp32_model()
    optimizer: Any = SGD(model.parameters(), lr=0.1)
    attachment = hook(model, optimizer, on_error=on_error)
    step(model, optimizer, 0)
    optimizer = change(model, optimizer)
    before = bits_of(model)
    if on_error == "raise":
        with pytest.raises(ConfigError, match="which attach was not given, steps the model"):
            step(model, optimizer, 1)
        assert same(bits_of(model), before)
    else:
        step(model, optimizer, 1)
        step(model, optimizer, 2)
        assert caplog.text.count("which attach was not given, steps the model") == 1
    attachment.detach()
    found = versions(tmp_path)
    assert same(found[max(found)].state, bits_of(model))


def test_an_optimizer_whose_parameters_are_no_longer_those_of_the_model_is_told(hook: Hook) -> None:
    model = fp32_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    hook(model, optimizer)
    step(model, optimizer, 0)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    with pytest.raises(ConfigError, match="SGD has no parameter of this model"):
        optimizer.step()


def test_optimizers_of_other_models_step_as_they_like(hook: Hook) -> None:
    model, other = fp32_model(), fp32_model()
    attachment = hook(model, SGD(model.parameters(), lr=0.1))
    step(other, SGD(other.parameters(), lr=0.1), 0)
    attachment.detach()
    assert attachment.publisher.version == 0


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


def test_a_step_inside_a_step_is_part_of_it(hook: Hook, tmp_path: Path) -> None:
    model = fp32_model()
    optimizer = Sam(model.parameters(), lr=0.1)
    attachment = hook(model, optimizer, when_busy="wait")

    def loss() -> None:
        model.zero_grad()
        model(torch.ones(4, 24)).square().mean().backward()

    truth = []
    for _ in range(2):
        loss()
        optimizer.step(loss)
        truth.append(bits_of(model))
    attachment.detach()
    assert_published(tmp_path, truth)


def test_the_inner_optimizer_of_a_step_in_two_calls_is_told(hook: Hook) -> None:
    model = fp32_model()
    optimizer = Sam(model.parameters(), lr=0.1)
    hook(model, optimizer)
    model(torch.ones(4, 24)).square().mean().backward()
    optimizer.first_step()
    with pytest.raises(ConfigError, match="SGD steps the model outside of a step of Sam") as caught:
        optimizer.second_step()
    assert "call its publish yourself" in caught.value.hint


def test_the_outer_optimizer_of_a_given_one_is_refused_before_its_step(
    hook: Hook, tmp_path: Path
) -> None:
    model = fp32_model()
    optimizer = Sam(model.parameters(), lr=0.1)
    hook(model, optimizer.base_optimizer)
    with pytest.raises(ConfigError, match="Sam, which attach was not given"):
        optimizer.step()
    assert list(versions(tmp_path)) == [0]


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


def test_what_a_step_does_after_the_one_it_inherits_is_part_of_it(
    hook: Hook, tmp_path: Path
) -> None:
    SGD(fp32_model().parameters())  # torch adds hooks to a class when the first of it is made
    model = fp32_model()
    optimizer = Clipped(model.parameters(), lr=0.1)
    attachment = hook(model, optimizer)
    step(model, optimizer, 0)
    attachment.detach()
    assert_published(tmp_path, [bits_of(model)])


def test_a_step_that_fails_is_not_published_and_the_next_is(hook: Hook, tmp_path: Path) -> None:
    model = fp32_model()
    optimizer = Clipped(model.parameters(), lr=0.1)
    attachment = hook(model, optimizer, when_busy="wait")
    optimizer.fails = True
    with pytest.raises(ValueError, match="half a step"):
        step(model, optimizer, 0)
    attachment.publisher.flush()
    assert attachment.publisher.version == 0
    optimizer.fails = False
    step(model, optimizer, 1)
    attachment.publisher.flush()
    assert same(versions(tmp_path)[1].state, bits_of(model))
    optimizer.fails = True
    with pytest.raises(ValueError, match="half a step"):
        step(model, optimizer, 2)
    attachment.detach()
    assert max(versions(tmp_path)) == 1


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch's own
def test_a_compiled_step_is_a_version(hook: Hook, tmp_path: Path) -> None:
    model = fp32_model()
    optimizer = AdamW(model.parameters(), lr=0.1)
    attachment = hook(model, optimizer, when_busy="wait")
    compiled = torch.compile(optimizer.step, backend="eager")
    truth = []
    for seed in range(3):
        backward(model, seed)
        compiled()
        truth.append(bits_of(model))
        optimizer.zero_grad()
    attachment.detach()
    assert_published(tmp_path, truth)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch's own
def test_a_step_compiled_as_one_graph_says_what_to_do(hook: Hook) -> None:
    model = fp32_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    hook(model, optimizer)
    model(torch.ones(4, 24)).square().mean().backward()
    torch.compiler.reset()  # it skips what an earlier compilation could not trace
    with pytest.raises(Exception, match=r"deltachain publishes .* compile the step without"):
        torch.compile(optimizer.step, backend="eager", fullgraph=True)()


def sgd(parameters: Iterable[nn.Parameter]) -> SGD:
    return SGD(parameters, lr=0.1)


@pytest.mark.parametrize("which", ["another", "one of two", "of a copy"])
def test_a_publisher_whose_optimizers_bring_no_version_is_not_ready(
    which: str, hook: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "deltachain")
    model = fp32_model()
    first, *rest = model.parameters()
    given = [sgd([first]), sgd(rest)] if which == "one of two" else [sgd(model.parameters())]
    other = {
        "another": sgd(model.parameters()),
        "one of two": given[0],
        "of a copy": sgd(copy.deepcopy(model).parameters()),
    }[which]
    hook(model, given, on_error="warn", metrics="127.0.0.1:0")
    url = re.findall(r"metrics at (\S+)/metrics", caplog.text)[0] + "/readyz"
    for several, code in ((given, 200), ([other] * 9, 503), (given, 200)):
        for one in several:
            one.step()
        assert httpx.get(url).status_code == code


def test_an_optimizer_that_does_not_step_is_told(
    hook: Hook, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = fp32_model()
    first, *others = model.parameters()
    one, other = SGD([first], lr=0.1), AdamW(others, lr=0.1)
    attachment = hook(model, [one, other])
    for seed in range(5):
        step(model, one, seed)
    assert caplog.text.count("SGD steps again before 1 of 2 optimizers did") == 1
    attachment.detach()
    assert same(versions(tmp_path)[1].state, bits_of(model))


@pytest.mark.parametrize("copies", ["both", "optimizer"])
def test_the_steps_of_a_copy_are_told(
    hook: Hook, caplog: pytest.LogCaptureFixture, copies: str
) -> None:
    model = fp32_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    attachment = hook(model, optimizer)
    if copies == "both":
        model, optimizer = copy.deepcopy((model, optimizer))
    else:
        optimizer = copy.deepcopy(optimizer)
    for seed in range(3):
        step(model, optimizer, seed)
    assert caplog.text.count("trains weights of the same shapes as this model's") == 1
    attachment.detach()
    assert "no step was published: SGD, which attach was given, did not step" in caplog.text


def test_other_models_that_are_trained_in_turn_are_not_called_copies(
    hook: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = fp32_model(), fp32_model()
    mine, its = SGD(model.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)
    attachment = hook(model, mine)
    for seed in range(3):
        step(other, its, seed)
        step(model, mine, seed)
    attachment.detach()
    assert "optimizer_steps" not in caplog.text  # the logger of all warnings about steps


def test_weights_that_are_changed_after_a_step_are_told(
    hook: Hook, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = fp32_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    attachment = hook(model, optimizer, when_busy="wait")
    for seed in range(3):
        step(model, optimizer, seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.01, 0.01)
    assert caplog.text.count("weights were changed after the optimizer's step") == 1
    attachment.detach()
    assert same(versions(tmp_path)[4].state, bits_of(model))


def test_changes_of_a_hook_after_a_step_are_part_of_it(
    hook: Hook, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = fp32_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    attachment = hook(model, optimizer, when_busy="wait")

    @torch.no_grad()
    def clamp(*_: object) -> None:
        for parameter in model.parameters():
            parameter.clamp_(-0.01, 0.01)

    optimizer.register_step_post_hook(clamp)
    for seed in range(2):
        step(model, optimizer, seed)
    attachment.detach()
    found = versions(tmp_path)
    assert len(found) == 3
    assert same(found[2].state, bits_of(model))
    assert "weights were changed" not in caplog.text


class Averaged(SGD):
    """As schedule-free optimizers: the weights are others between ``eval`` and ``train``."""

    def eval(self) -> None:
        pass

    def train(self) -> None:
        pass


def test_weights_that_are_not_those_for_evaluation_are_named(
    hook: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    model = fp32_model()
    hook(model, Averaged(model.parameters()))
    assert "Averaged has other weights for evaluation" in caplog.text
