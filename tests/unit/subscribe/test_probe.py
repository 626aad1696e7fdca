"""Layers that are tried: what they compute from, and that they are put back as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltachain.subscribe.probe import (
    Members,
    follows,
    is_plain,
    output_of,
    processed,
    restoring,
)


class Method:
    """Multiplies by a layer's weight, or by a copy of it that was made after loading."""

    def __init__(self, packed: Tensor | None = None) -> None:
        self.packed = packed

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.shape[-1] != layer.weight.shape[1]:
            raise ValueError("no such row")
        found = x @ (layer.weight if self.packed is None else self.packed).t()
        return found if bias is None else found + bias

    def process_weights_after_loading(self, layer: Any) -> None:
        """Nothing is done."""


class Linear(nn.Module):
    def __init__(self, *, packed: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, dtype=torch.bfloat16), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)
        self.input_size_per_partition = 8
        self.quant_method: Any = Method(self.weight.data.clone() if packed else None)


def test_a_layer_that_computes_from_its_weight_follows_it() -> None:
    layer = Linear()
    before = layer.weight.data.clone()
    assert follows(layer)
    assert torch.equal(layer.weight.data, before)


def test_a_layer_that_computes_from_a_copy_does_not() -> None:
    assert not follows(Linear(packed=True))


def test_a_layer_that_raises_is_not_believed() -> None:
    layer = Linear()
    layer.quant_method = object()
    assert not follows(layer)
    assert output_of(layer) is None


@pytest.mark.parametrize("weight", [torch.zeros(0, 0), torch.zeros(3), torch.zeros(2, 2).int()])
def test_what_can_not_be_tried_is_left_to_reading_back(weight: Tensor) -> None:
    layer = Linear()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    assert follows(layer)


def test_an_output_shows_a_hidden_copy_that_changed() -> None:
    layer = Linear(packed=True)
    before = output_of(layer)
    assert before is not None
    layer.quant_method.packed += 1
    after = output_of(layer)
    assert after is not None
    assert not torch.equal(before, after)


def test_members_are_put_back_if_the_body_raises() -> None:
    model = nn.Sequential(Linear(), Linear())
    layer: Any = model[0]
    weight, packed = layer.weight, torch.ones(1)
    layer.quant_method.packed = packed

    def change() -> None:
        layer.weight = nn.Parameter(torch.zeros(0), requires_grad=False)
        layer.note = 1
        layer.quant_method.packed = None
        raise OSError("device lost")

    with pytest.raises(OSError, match="lost"), restoring(model):
        change()
    assert layer.weight is weight
    assert not hasattr(layer, "note")
    assert layer.quant_method.packed is packed


def test_members_stay_as_the_body_left_them() -> None:
    model = nn.Sequential(Linear())
    with restoring(model):
        model[0].note = 1  # type: ignore[assignment]
    assert model[0].note == 1


def test_buffers_are_members_too() -> None:
    layer = Linear()
    layer.register_buffer("scale", torch.ones(1))
    members = Members.of(layer)
    del layer.scale
    members.put_back()
    assert torch.equal(layer.get_buffer("scale"), torch.ones(1))


def test_a_layer_is_plain_if_it_multiplies_by_any_pattern() -> None:
    layer = Linear()
    before = layer.weight.data.clone()
    assert is_plain(layer)
    assert torch.equal(layer.weight.data, before)
    assert not layer.bias.data.any()


def test_a_layer_that_rearranges_is_not_plain() -> None:
    layer = Linear()
    layer.quant_method.apply = lambda layer, x, bias: x @ layer.weight.flip(0).t() + bias
    layer.weight.data.zero_()
    assert not is_plain(layer)
    layer.quant_method.apply = lambda layer, x, bias: x @ layer.weight.t() + bias.flip(0)
    assert not is_plain(layer)
    assert not layer.weight.data.any()


def test_layers_with_something_to_do_after_loading_are_known_with_their_parts() -> None:
    outer: Any = nn.Sequential(nn.Sequential(Linear(), nn.Linear(2, 2)), nn.Linear(2, 2))
    assert processed(outer) == {"0.0"}
    outer[0].process_weights_after_loading = lambda _: None
    assert processed(outer) == {"0", "0.0", "0.1"}
