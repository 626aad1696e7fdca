"""Steps of optimizers that are several, inside one another, replaced, compiled, or fail."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import SGD, AdamW

from deltachain.errors import ConfigError
from tests.support.models import bits_of, same
from tests.unit.publish.test_hook import (
    Hook,
    assert_published,
    backward,
    fp32_model,
    hook,
    step,
    versions,
)

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


def test_an_optimizer_whose_parameters_are_no_longer_those_of_the_model_is_told(
    hook: Hook,
) -> None:
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
