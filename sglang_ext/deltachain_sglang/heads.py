"""Heads for later tokens that SGLang drafts with, which the checkpoint of the model has."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deltachain.replica.layout.module_members import dressed


class WithHeads(nn.Module):
    """A model and its heads as one model, in which the heads are ``draft``.

    Args:
        model: The model.
        heads: Its heads.
        shared: Names of parameters with which the heads compute, but that the model alone loads: a
            checkpoint's copies for the heads are unused.
    """

    def __init__(self, model: Any, heads: Any, shared: frozenset[str]) -> None:
        super().__init__()
        vars(self).update(vars(model), _modules={**model._modules, "draft": heads})
        self._loads = model.load_weights, heads.load_weights
        self.shared = shared

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        of_model, of_heads = self._loads
        given = list(tensors)  # each loader takes all, and knows its own by their names
        of_model(iter(given))
        with self._apart():
            of_heads(iter(given))

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Hide from the heads what they share with the model; loads into it are dropped."""
        heads: Any = self.get_submodule("draft")
        held = [
            (heads.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2]) for n in self.shared
        ]
        kept: list[Any] = [module._parameters[name] for module, name in held]
        try:
            for (module, name), one in zip(held, kept, strict=True):
                module._parameters[name] = dressed(torch.empty_like(one, device="meta"), one)
            yield
        finally:
            for (module, name), one in zip(held, kept, strict=True):
                module._parameters[name] = one


def with_heads(model: nn.Module, heads: nn.Module) -> WithHeads:
    own = {id(one) for one in model.parameters()}
    shared = {name for name, one in heads.named_parameters() if id(one) in own}
    return WithHeads(model, heads, frozenset(shared))
