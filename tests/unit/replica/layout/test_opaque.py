"""What may hold weights where no look at a module shows them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deltachain.replica.layout.members import is_opaque, may_hide_tensors, storage_id

PACKED = torch.ones(2)


@dataclass(frozen=True, slots=True)
class Slotted:
    """As configurations and kernels are written."""

    value: Any = 1


class Handle:
    """What frees something when it goes."""

    def __del__(self) -> None:
        self.address = 0


class KernelConfig(Handle):
    """What only says how."""


def closure_of(value: Any) -> Any:
    return lambda: value


def recursive() -> Any:
    def again() -> Any:
        return again

    return again


def with_default(value: Any) -> Any:
    def kernel(x: Any, weight: Any = value) -> Any:
        return x, weight

    return kernel


HIDING: dict[str, Any] = {
    "closure": closure_of(PACKED),
    "closure in a closure": closure_of(closure_of(PACKED)),
    "default": with_default(PACKED),
    "partial": partial(len, PACKED),
    "keyword of a partial": partial(dict, key=PACKED),
    "slot": Slotted(PACKED),
    "slot of a slot": Slotted(Slotted(PACKED)),
    "frozen set": frozenset([PACKED]),
    "handle": Handle(),
    "array": np.ones(2),
    "lock": threading.Lock(),
    "bound": [1, 2].__getitem__,
    "iterator": iter([PACKED]),
}

PLAIN: dict[str, Any] = {
    "closure": closure_of(1),
    "recursive": recursive(),
    "default": with_default(None),
    "partial": partial(len, "name"),
    "slot": Slotted(),
    "slot of a slot": Slotted(Slotted()),
    "frozen set": frozenset(["name"]),
    "configuration": KernelConfig(),
    "tensor": PACKED,
    "module": nn.Linear(1, 1),
    "path": Path(),
    "dtype": torch.bfloat16,
    "built in": len,
    "function of torch": torch.add,
    "function of modules": nn.functional.linear,
    "generator": torch.Generator(),
    "range": range(3),
    "nothing": None,
    "list": [PACKED],
}


@pytest.mark.parametrize("name", HIDING)
def test_this_may_hide_weights(name: str) -> None:
    assert may_hide_tensors(HIDING[name])


@pytest.mark.parametrize("name", PLAIN)
def test_this_hides_none(name: str) -> None:
    assert not may_hide_tensors(PLAIN[name])


class Method:
    """What acts on a layer after loading."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Keep a kernel."""


def shown(layer: nn.Module) -> set[int]:
    """Storages of what a layer is seen to hold."""
    return {storage_id(tensor) for tensor in layer.parameters()}


class Kernel:
    """What computes from a weight of its own."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def apply(self, x: Any) -> Any:
        return self.weight @ x


COPIES: dict[str, Any] = {
    "object": Kernel(PACKED),
    "bound method": Kernel(PACKED).apply,
    "object in an object": Kernel(Kernel(PACKED)),
    "closure in an object": Kernel(closure_of(PACKED)),
    "partial in an object": Kernel(partial(len, PACKED)),
    "list in an object": Kernel([Kernel(PACKED)]),
    "slot in an object": Kernel(Slotted(PACKED)),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_behind_objects_is_found_unless_it_can_be_seen(name: str) -> None:
    layer = nn.Linear(1, 1)
    vars(layer)["kernel"] = COPIES[name]
    assert is_opaque(layer, shown(layer))
    assert not is_opaque(layer, {*shown(layer), storage_id(PACKED)})


def test_a_configuration_with_a_copy_is_found() -> None:
    layer, config = nn.Linear(1, 1), KernelConfig()
    vars(layer)["config"] = config
    assert not is_opaque(layer, shown(layer))
    vars(config)["scale"] = Kernel(PACKED)
    assert is_opaque(layer, shown(layer))


def test_objects_that_lead_back_to_themselves_have_an_end() -> None:
    layer, kernel = nn.Linear(1, 1), Kernel(None)
    kernel.weight = [kernel, layer]
    vars(layer)["kernel"] = kernel
    assert not is_opaque(layer, shown(layer))


def test_it_is_found_in_what_acts_and_not_in_what_is_only_there() -> None:
    layer = nn.Linear(1, 1)
    assert not is_opaque(layer, shown(layer))
    layer.group = Slotted()  # type: ignore[assignment]
    assert not is_opaque(layer, shown(layer))
    layer.method = Method()  # type: ignore[assignment]
    assert not is_opaque(layer, shown(layer))
    vars(layer.method)["kernels"] = [closure_of(PACKED)]
    assert is_opaque(layer, shown(layer))
