"""The judge of tokens forgives a rounding, and nothing more."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.engines.expected import MARGIN, Judge, inputs, rounding, weights
from tests.engines.trainer import make_batches, masters_of, one_thread, pretrain

pytestmark = pytest.mark.engine

LENGTH = 64
LAYER = "model.layers.0.mlp.gate"


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, list[int]]:
    base = tmp_path_factory.mktemp("experts")
    with one_thread():
        batches = make_batches(0)
        pretrain("qwen3_moe", base, batches, 0)
    model = masters_of(base)
    with torch.no_grad():  # A choice of experts decides more than the tolerance.
        for name, weight in model.named_parameters():
            if name.endswith("experts.down_proj"):
                weight.mul_(4)
    return model.eval(), next(batches)[0, :LENGTH].tolist()


def logits(model: nn.Module, text: list[int]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=torch.tensor([text])).logits
    return found[0].float()


def apart(
    model: PreTrainedModel, text: list[int], position: int, gap: float
) -> tuple[Tensor, Tensor]:
    """Weights whose second and third expert at a position are a gap apart; and the other way."""
    given = inputs(model, lambda: logits(model, text))[LAYER][position]
    weight = weights(model)[LAYER]
    found = weight @ given
    second, third = found.argsort(descending=True)[1:3]
    ways = []
    for difference in (gap, -gap):
        way = weight.clone()
        way[third] += (found[second] - found[third] - difference) * given / given.dot(given)
        ways.append(way)
    return ways[0], ways[1]


def test_a_token_of_the_other_expert_is_right_only_where_rounding_decides(
    experts: tuple[PreTrainedModel, list[int]], tmp_path: Path
) -> None:
    model, text = experts
    error = rounding(model, copy.deepcopy(model).bfloat16(), lambda one: logits(one, text))
    assert error > 0
    weight, tried = weights(model)[LAYER], 0
    kept = weight.clone()
    for position in range(8, LENGTH - 1):
        for gap, forgiven in ((error / 8, True), (16 * error, False)):
            served, other = apart(model, text, position, gap)
            weight.copy_(other)
            token = int(logits(model, text)[position].argmax())
            weight.copy_(served)
            behind = logits(model, text)[position]
            folder = tmp_path / f"{position}-{forgiven}"
            if behind.max() - behind[token] > 2 * MARGIN:
                model.save_pretrained(folder)
                judge = Judge(folder)
                assert judge.wrong(text[: position + 1], [token], [0]) == ([] if forgiven else [0])
                tried |= 1 << forgiven
            weight.copy_(kept)
    assert tried == 0b11
