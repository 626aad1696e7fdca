"""Steps of which the versions may not be what a user expects: a line in the log says so."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch.optim import SGD, AdamW

from tests.support.models import bits_of, same
from tests.unit.publish.test_hook import Hook, fp32_model, hook, step, versions

__all__ = ["hook"]  # a fixture


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
