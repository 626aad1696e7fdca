from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import SGD

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


def assert_published(tmp_path: Path, truth: list[State]) -> None:
    """The versions after the first are these states."""
    found = versions(tmp_path)
    assert len(found) == 1 + len(truth)
    assert all(same(found[v].state, bits) for v, bits in enumerate(truth, start=1))


REFUSED: dict[str, tuple[Callable[[nn.Module], tuple[Any, Any]], str, str]] = {
    "no optimizer": (
        lambda model: (model, object()),
        "no torch optimizer",
        "Publisher.publish",
    ),
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
