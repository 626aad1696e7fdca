"""Routers of a model of experts: the rounding of their logits, and the choices that it decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

NAMES: Final = ("gate", "router")
"""Last parts of the names that transformers gives them; each has a ``weight``, a row an expert."""


def routers(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in NAMES and hasattr(module, "weight")
    }


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: cast("Tensor", one.weight).detach() for name, one in routers(model).items()}


@torch.no_grad()
def inputs(model: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """What reaches each router while a model runs, ``(tokens, hidden size)`` in fp32, by name."""
    found: dict[str, Tensor] = {}

    def keep(name: str, _: nn.Module, given: tuple[Any, ...]) -> None:
        found[name] = given[0].reshape(-1, given[0].shape[-1]).float()

    with ExitStack() as hooks:
        for name, router in routers(model).items():
            hook = router.register_forward_pre_hook(partial(keep, name))
            hooks.callback(hook.remove)
        run()
    return found


@torch.no_grad()
def rounding(exact: nn.Module, rounded: nn.Module, run: Callable[[nn.Module], object]) -> float:
    """The greatest difference between the router logits of a model and of itself in bf16."""
    sides = [
        {name: linear(given, weights(model)[name].float()) for name, given in found.items()}
        for model in (exact, rounded)
        for found in (inputs(model, partial(run, model)),)
    ]
    each = [float((sides[0][name] - sides[1][name]).abs().max()) for name in sides[0]]
    return max(each, default=0.0)


def nudged(model: nn.Module, position: int, by: float, run: Callable[[], object]) -> Iterator[None]:
    """Move the logit of one expert after another at a position, up and down; yield at each."""
    for name, given in inputs(model, run).items():
        weight, at = weights(model)[name], given[position]
        for expert in range(len(weight)):
            for change in (by, -by):
                with _restored(weight):
                    weight[expert] += change * at / at.dot(at)
                    yield


@contextmanager
def _restored(weight: Tensor) -> Iterator[None]:
    kept = weight.clone()
    try:
        yield
    finally:
        weight.copy_(kept)
