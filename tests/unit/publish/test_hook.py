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
from tests.support.models import Recomputed, bits_of, plain_model, recompute, same

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
    torch.manual_seed(seed)
    model(torch.randn(4, 24)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_an_optimizer_that_is_none_is_refused_with_what_to_do(hook: Hook) -> None:
    with pytest.raises(ConfigError, match="no torch optimizer") as caught:
        hook(fp32_model(), object())
    assert "Publisher.publish" in caught.value.hint


def test_the_optimizer_of_another_model_is_refused(hook: Hook, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SGD has no parameter of this model") as caught:
        hook(fp32_model(), SGD(fp32_model().parameters()))
    assert "Publisher.publish" in caught.value.hint
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


def test_a_module_without_an_optimizer_says_what_to_pass(hook: Hook) -> None:
    with pytest.raises(ConfigError, match="attach needs the optimizer") as caught:
        hook(fp32_model(), None)
    assert "attach(model, optimizer, url=...)" in caught.value.hint
    assert "Publisher(url).attach(model)" in caught.value.hint


def test_what_is_neither_a_module_nor_a_trainer_is_refused(hook: Hook) -> None:
    model = fp32_model()
    optimizer = SGD(model.parameters())
    with pytest.raises(ConfigError, match="SGD is neither a module nor a trainer") as caught:
        hook(optimizer, model)
    assert "attach(model, optimizer" in caught.value.hint


@pytest.mark.parametrize("every_steps", ["2", 1.5, True])
def test_every_steps_is_a_whole_number(hook: Hook, every_steps: Any) -> None:
    model = fp32_model()
    with pytest.raises(ConfigError, match=r"every_steps=.*expected 1 or more"):
        hook(model, SGD(model.parameters()), every_steps=every_steps)


def test_fewer_than_one_step_a_version_is_refused(hook: Hook) -> None:
    model = fp32_model()
    with pytest.raises(ConfigError, match="every_steps=0"):
        hook(model, SGD(model.parameters()), every_steps=0)


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


def test_versions_can_be_several_steps_apart(hook: Hook, tmp_path: Path) -> None:
    model = fp32_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    config = PublishConfig(url="memory://replaced", when_busy="wait")
    attachment = hook(model, optimizer, every_steps=2, config=config, metadata={"run": "b"})
    for seed in range(5):
        step(model, optimizer, seed)
    attachment.publisher.flush()
    manifests = [r.committed.manifest for r in versions(tmp_path).values()]
    assert [m.step for m in manifests] == [None, 2, 4]
    assert {m.metadata["run"] for m in manifests} == {"b"}


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
    attachment = hook(model, optimizer, every_steps=2, when_busy="wait")
    for seed in range(3):
        step(model, optimizer, seed)
    attachment.detach()
    found = versions(tmp_path)
    assert [found[v].committed.manifest.step for v in found] == [None, 2, 3]
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
