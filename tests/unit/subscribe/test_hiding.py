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

from deltachain.subscribe.hiding import hides, may_hide

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


@pytest.mark.parametrize(
    "value",
    [
        closure_of(PACKED),
        closure_of(closure_of(PACKED)),
        with_default(PACKED),
        partial(len, PACKED),
        partial(dict, key=PACKED),
        Slotted(PACKED),
        Slotted(Slotted(PACKED)),
        frozenset([PACKED]),
        Handle(),
        np.ones(2),
        threading.Lock(),
        [1, 2].__getitem__,
        iter([PACKED]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_this_may_hide_weights(value: Any) -> None:
    assert may_hide(value)


@pytest.mark.parametrize(
    "value",
    [
        closure_of(1),
        recursive(),
        with_default(None),
        partial(len, "name"),
        Slotted(),
        Slotted(Slotted()),
        frozenset(["name"]),
        KernelConfig(),
        PACKED,
        nn.Linear(1, 1),
        Path(),
        torch.bfloat16,
        len,
        torch.add,
        nn.functional.linear,
        torch.Generator(),
        range(3),
        None,
        [PACKED],
    ],
    ids=lambda value: type(value).__name__,
)
def test_this_hides_none(value: Any) -> None:
    assert not may_hide(value)


class Method:
    """What acts on a layer after loading."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Keep a kernel."""


def test_it_is_found_in_what_acts_and_not_in_what_is_only_there() -> None:
    layer = nn.Linear(1, 1)
    assert not hides(layer)
    layer.group = Slotted()  # type: ignore[assignment]
    assert not hides(layer)
    layer.method = Method()  # type: ignore[assignment]
    assert not hides(layer)
    vars(layer.method)["kernels"] = [closure_of(PACKED)]
    assert hides(layer)
