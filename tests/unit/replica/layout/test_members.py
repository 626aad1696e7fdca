"""What modules hold: put back whole, settled where it was replaced, left alone otherwise."""

from __future__ import annotations

import gc
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from deltachain.errors import TensorMismatchError
from deltachain.replica.layout.members import (
    Members,
    SavedBits,
    may_hide_tensors,
    restoring,
    tensors_in,
    undisturbed,
)


class Kernel:
    """What a quantisation method sets up, and keeps weights in."""

    def __init__(self, packed: Tensor) -> None:
        self.packed = packed


class Method:
    """Acts after loading."""

    kernel: Kernel | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        self.kernel = Kernel(layer.weight.data.clone())


class Handle:
    """Owns what a library made, and keeps its address in a tensor: oneDNN's are like that."""

    living: ClassVar[set[int]] = set()

    def __init__(self, address: int) -> None:
        self.address = torch.tensor(address)
        self.living.add(address)

    def __del__(self) -> None:
        self.living.discard(int(self.address))


class Layer(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8), requires_grad=False)
        self.register_buffer("scale", torch.ones(1))
        self.split = [torch.ones(2), torch.zeros(2)]
        self.quant_method: Any = Method()
        self.quant_method.process_weights_after_loading(self)


def everything(layer: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {f"attribute {name}": id(value) for name, value in vars(layer).items()}
    found |= {f"parameter {name}": id(value) for name, value in layer._parameters.items()}
    found |= {f"hook {name}": id(value) for name, value in layer._forward_hooks.items()}
    for name, tensor in tensors_in(layer):
        found[name] = (id(tensor), tensor.data_ptr(), tensor.detach().numpy().tobytes())
    return found


def disturb(layer: Layer) -> None:
    layer.weight = nn.Parameter(torch.zeros(0), requires_grad=False)
    layer.register_parameter("late", nn.Parameter(torch.zeros(3), requires_grad=False))
    layer.register_forward_hook(lambda *_: None)
    layer.scale.data = torch.zeros(1)
    layer.split[0] = torch.zeros(2)
    layer.split[1].fill_(9)
    layer.quant_method.kernel = None
    layer.note = 1  # type: ignore[assignment]
    del layer._buffers["scale"]


def test_whatever_the_body_does_everything_is_as_it_was() -> None:
    layer = Layer()
    before = everything(layer)
    tensors = dict(tensors_in(layer))

    def act() -> None:
        with undisturbed([layer], tensors):
            disturb(layer)
            raise OSError("device lost")

    with pytest.raises(OSError, match="lost"):
        act()
    assert everything(layer) == before


def test_members_stay_as_the_body_left_them_unless_it_raises() -> None:
    layer = Layer()
    with restoring([layer]):
        layer.note = 1  # type: ignore[assignment]
    assert layer.note == 1


def test_tensors_in_lists_and_in_what_acts_after_loading_are_found() -> None:
    names = {name for name, _ in tensors_in(Layer())}
    assert names == {"weight", "scale", "split.0", "split.1", "quant_method.kernel.packed"}


def test_new_tensors_are_settled_into_the_old_ones() -> None:
    layer = Layer()
    at = {name: (id(tensor), tensor.data_ptr()) for name, tensor in tensors_in(layer)}
    members = Members([layer])
    new = torch.randn(4, 8)
    layer.weight = nn.Parameter(new, requires_grad=False)
    layer.split = [torch.full((2,), 5.0), torch.full((2,), 6.0)]
    layer.quant_method.process_weights_after_loading(layer)
    layer.kernel = len  # type: ignore[assignment]
    members.settle()
    assert {name: (id(tensor), tensor.data_ptr()) for name, tensor in tensors_in(layer)} == at
    assert torch.equal(layer.weight, new)
    assert torch.equal(layer.quant_method.kernel.packed, new)
    assert [float(one[0]) for one in layer.split] == [5.0, 6.0]
    assert layer.kernel is len


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_owns_something_is_taken_whole(*, goes_on: bool) -> None:
    """With the address of a new handle, the old one would own what ends with the new one."""
    layer = Layer()
    layer.quant_method.handle = Handle(1)
    assert "quant_method.handle.address" not in dict(tensors_in(layer))
    members = Members([layer])
    layer.quant_method.handle = Handle(2)
    assert list(members.replaced()) == [layer.quant_method.handle]
    assert may_hide_tensors(layer.quant_method.handle)
    if goes_on:
        members.settle()
    else:
        members.put_back()
    del members
    gc.collect()
    assert int(layer.quant_method.handle.address) == 1 + goes_on
    assert Handle.living == {1 + goes_on}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda layer: delattr(layer, "weight"), "dropped its tensor 'weight'"),
        (lambda layer: setattr(layer, "extra", torch.ones(1)), "another tensor, 'extra'"),
        (lambda layer: setattr(layer, "scale", torch.ones(2)), r"float32\(2,\), it was"),
        (
            lambda layer: setattr(layer, "scale", torch.ones(1).double()),
            "as torch.float64",
        ),
    ],
    ids=["dropped", "extra", "shape", "dtype"],
)
def test_what_cannot_be_settled_is_told(change: Any, why: str) -> None:
    layer = Layer()
    members = Members([layer])
    change(layer)
    with pytest.raises(TensorMismatchError, match=why):
        members.settle()


def test_bits_know_what_changed() -> None:
    layer = Layer()
    bits = SavedBits(dict(tensors_in(layer)))
    assert not bits.has_changed(layer.weight)
    layer.weight.data[3, 7] += 1
    assert bits.has_changed(layer.weight)
    assert not bits.has_changed(layer.scale)
    assert bits.has_changed(torch.ones(3)), "memory that was not recorded"
    bits.put_back()
    assert not bits.has_changed(layer.weight)
