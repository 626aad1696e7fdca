"""Scales that attention backends have as numbers when graphs are captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from deltachain.errors import TensorMismatchError
from deltachain_vllm.scales import uncaptured


class TakesTensors:
    """A backend such as FlashAttention: its kernel reads scales from memory."""

    def forward(self, layer: Any) -> object:
        return layer._k_scale


class TakesNumbers:
    """A backend such as that of MiniMax M3: its kernel is called with numbers."""

    def forward(self, layer: Any) -> object:
        return layer._k_scale_float


class OfAKind(TakesNumbers):
    """Another that inherits from it."""


class Either:
    """One of several, by the batch."""

    def get_impl_variants(self) -> tuple[object, ...]:
        return TakesTensors(), TakesNumbers()


def model(impl: object) -> nn.Module:
    made = nn.Module()
    made.attn = nn.Module()
    vars(made.attn).update(impl=impl, _k_scale_float=1.0)
    return made


def config(*, full: bool) -> Any:
    mode = SimpleNamespace(has_full_cudagraphs=lambda: full)
    return SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))


def load(into: nn.Module, scale: float, *, full: bool = True) -> None:
    with uncaptured(into, config(full=full)):
        vars(into.attn)["_k_scale_float"] = scale


@pytest.mark.parametrize("impl", [TakesNumbers(), OfAKind(), Either()])
def test_numbers_in_captured_graphs_may_not_change(impl: object) -> None:
    load(model(impl), 1.0)
    with pytest.raises(TensorMismatchError, match="have the scales of attn as numbers"):
        load(model(impl), 2.0)


def test_numbers_may_change_where_no_graph_has_them() -> None:
    load(model(TakesTensors()), 2.0)
    load(model(TakesNumbers()), 2.0, full=False)
    with uncaptured(
        model(TakesNumbers()),
        SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=None)),
    ):
        pass


def test_what_cannot_be_read_is_taken_for_one_that_takes_numbers() -> None:
    unread: Any = type("Unread", (), {"__module__": "builtins"})
    with pytest.raises(TensorMismatchError, match="captured graphs"):
        load(model(unread()), 2.0)
