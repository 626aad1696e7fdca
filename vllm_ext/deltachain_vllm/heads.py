"""Heads for later tokens that vLLM drafts with, loaded from the checkpoint of the model itself."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deltachain.replica.layout.module_members import dressed

from . import compat


class WithHeads(nn.Module):
    """A model and its heads as one model, in which the heads are ``draft``.

    Heads compute with the embedding and the head of the model, which alone load these: a
    checkpoint's copies for the heads are unused.
    """

    def __init__(self, model: Any, draft: Any) -> None:
        super().__init__()
        vars(self).update(vars(model), _modules={**model._modules, "draft": draft})
        self._loads = model.load_weights, draft.load_weights
        self._shared = frozenset(model.modules())

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        of_model, of_heads = self._loads
        given = list(tensors)  # each loader takes all, and knows its own by their names
        of_model(iter(given))
        with self._apart(), compat.some_heads():
            of_heads(iter(given))

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Hide from the heads what they share with the model."""
        held = [
            (module._modules, name, child)
            for module in self.get_submodule("draft").modules()
            for name, child in module._modules.items()
            if child in self._shared
        ]
        try:
            for children, name, child in held:
                children[name] = _empty(child)
            yield
        finally:
            for children, name, child in held:
                children[name] = child


def _empty(layer: Any) -> nn.Module:
    """Return a copy of a layer without elements; loads into it are dropped."""
    made: nn.Module = copy.copy(layer)
    made._parameters = {}
    for name, parameter in layer._parameters.items():
        if parameter is not None:
            made._parameters[name] = dressed(
                torch.empty_like(parameter.data, device="meta"), parameter
            )
            compat.own_loader(made._parameters[name])
    return made
