"""Layers that are tried: what they compute from."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deltachain.replica.layout.loaded_checkpoint import layers_of
from deltachain.replica.layout.members import MemoryIndex
from deltachain.replica.layout.model_state import idle, is_plain, processed


class ProbedMethod:
    """Multiplies by a layer's weight, or by a copy of it that was made after loading."""

    def __init__(self, packed: Tensor | None = None) -> None:
        self.packed = packed

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.shape[-1] != layer.weight.shape[1]:
            raise ValueError("no such row")
        found = x @ (layer.weight if self.packed is None else self.packed).t()
        return found if bias is None else found + bias

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.packed is not None:
            self.packed = layer.weight.data.clone()


class Linear(nn.Module):
    def __init__(self, *, packed: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, dtype=torch.bfloat16), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)
        self.input_size_per_partition = 8
        self.quant_method: Any = ProbedMethod(self.weight.data.clone() if packed else None)


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
    outer[0].process_weights_after_loading = lambda layer: layer.eval()
    assert processed(outer) == {"0", "0.0", "0.1"}


def test_layers_whose_processing_only_returns_are_idle_outside_of_others() -> None:
    """As engines' base classes have it: no load makes their embeddings again."""

    class Empty:
        def process_weights_after_loading(self, _: nn.Module) -> None:
            """Pack, say."""
            return

    class Packing(Empty):
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            super().process_weights_after_loading(layer)

    layer: Any = Linear()
    layer.part = nn.Linear(2, 2)
    layer.quant_method = Empty()
    outer: Any = nn.Sequential(layer, nn.Linear(2, 2))
    modules = dict(outer.named_modules())
    assert processed(outer) == idle(modules) == {"0", "0.part"}
    for acting in (
        Packing().process_weights_after_loading,
        partial(Empty().process_weights_after_loading),
        list(range(3)).append,
        lambda layer: layer.missing,
    ):
        layer.quant_method.process_weights_after_loading = acting
        assert processed(outer) == {"0", "0.part"}
        assert idle(modules) == set()
    layer.quant_method = Empty()
    outer.process_weights_after_loading = outer.to
    assert idle(modules) == set()


def test_a_tensor_that_a_loader_registers_is_loaded_into_its_layer() -> None:
    """As vLLM loads the bias of a head: nothing of it was there before."""
    head = Linear()
    owners = MemoryIndex([("head", head.weight)]).overlapping
    del head.bias

    def load(tensors: Any) -> None:
        for name, tensor in tensors:
            if name == "weight":
                head.weight.data.copy_(tensor)
            elif name == "bias":
                head.bias = nn.Parameter(torch.empty(4), requires_grad=False)
                head.bias.data.copy_(tensor)

    names = {
        "weight": torch.empty(4, 8, device="meta"),
        "bias": torch.empty(4, device="meta"),
        "other": torch.empty(4, device="meta"),
    }
    into = frozenset({"head"})
    assert layers_of(load, names, owners, {"head": head}) == {"weight": into, "bias": into}
