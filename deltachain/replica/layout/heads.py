"""Drafts: heads for later tokens in the model's checkpoint, and models with their own chain."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .module_members import dressed


class DraftOnly(nn.Module):
    """A draft without the parameters of the model that it computes with, such as its embedding.

    The model alone loads these: a checkpoint's copies for the draft are unused.

    Args:
        draft: The draft.
        model: The model.
        like: The same of another model, whose draft shares the same parameters; else this one.
        own_loader: Gives a parameter back the loader that the engine replaced.
    """

    def __init__(
        self,
        draft: nn.Module,
        model: nn.Module,
        like: "DraftOnly | None" = None,
        *,
        own_loader: Callable[[Any], object] = id,
    ) -> None:
        super().__init__()
        vars(self).update(vars(draft))
        self._load: Any = draft.load_weights
        self._own_loader = own_loader
        own = {id(one) for one in model.parameters()}
        mine = draft.named_parameters(remove_duplicate=False)
        shared = [name for name, one in mine if id(one) in own]
        self._shared: list[str] = like._shared if like else shared

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors, while what is shared is hidden; loads into it are dropped."""
        places = [name.rpartition(".") for name in self._shared]
        modules: list[tuple[Any, str]] = [(self.get_submodule(p), name) for p, _, name in places]
        held = [(module._parameters, name) for module, name in modules]
        kept = [parameters[name] for parameters, name in held]
        try:
            for (parameters, name), one in zip(held, kept, strict=True):
                parameters[name] = dressed(torch.empty_like(one.data, device="meta"), one)
                self._own_loader(parameters[name])
            self._load(tensors)
        finally:
            for (parameters, name), one in zip(held, kept, strict=True):
                parameters[name] = one


class WithHeads(nn.Module):
    """A model and its heads for later tokens as one model, in which the heads are ``draft``.

    Args:
        model: The model.
        heads: Its heads.
        like: The same of another model, as for :class:`DraftOnly`.
        partly: Makes a context in which heads may load some of their tensors without the others.
        own_loader: As for :class:`DraftOnly`.
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
        self._heads: tuple[DraftOnly] = (  # in a tuple: it is no module of this one
            DraftOnly(heads, model, like._heads[0] if like else None, own_loader=own_loader),
        )
        self._of_model: Any = model.load_weights
        self._partly = partly

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        given = list(tensors)  # each loader takes all, and knows its own by their names
        self._of_model(iter(given))
        with self._partly():
            self._heads[0].load_weights(iter(given))
