"""Heads for later tokens that an engine drafts with, which the checkpoint of the model has."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .module_members import dressed


class WithHeads(nn.Module):
    """A model and its heads as one model, in which the heads are ``draft``.

    Heads compute with parameters of the model, such as its embedding, which alone loads these: a
    checkpoint's copies for the heads are unused.

    Args:
        model: The model.
        heads: Its heads.
        like: The same of another model, whose heads share the same parameters; else this one.
        partly: Makes a context in which heads may load some of their tensors without the others.
        own_loader: Gives a parameter back the loader that the engine replaced.
    """

    def __init__(
        self,
        model: nn.Module,
        heads: nn.Module,
        like: "WithHeads | None" = None,
        *,
        partly: Callable[[], AbstractContextManager[Any]] = nullcontext,
        own_loader: Callable[[Any], object] = id,
    ) -> None:
        super().__init__()
        vars(self).update(vars(model), _modules={**model._modules, "draft": heads})
        self._loads: Any = (model.load_weights, heads.load_weights)
        self._partly, self._own_loader = partly, own_loader
        own = {id(one) for one in model.parameters()}
        theirs = heads.named_parameters(remove_duplicate=False)
        shared = [name for name, one in theirs if id(one) in own]
        self._shared: list[str] = like._shared if like else shared

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        of_model, of_heads = self._loads
        given = list(tensors)  # each loader takes all, and knows its own by their names
        of_model(iter(given))
        with self._apart(), self._partly():
            of_heads(iter(given))

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Hide from the heads what they share with the model; loads into it are dropped."""
        heads: Any = self.get_submodule("draft")
        places = [name.rpartition(".") for name in self._shared]
        held = [(heads.get_submodule(path)._parameters, name) for path, _, name in places]
        kept = [parameters[name] for parameters, name in held]
        try:
            for (parameters, name), one in zip(held, kept, strict=True):
                parameters[name] = dressed(torch.empty_like(one.data, device="meta"), one)
                self._own_loader(parameters[name])
            yield
        finally:
            for (parameters, name), one in zip(held, kept, strict=True):
                parameters[name] = one
