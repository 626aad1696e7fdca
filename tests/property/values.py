"""The bits of a random checkpoint, and of the versions that follow it."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Final

import torch
from torch import Tensor

from tests.property.layers import DTYPES
from tests.property.recipe import Recipe, Source

WIDTHS: Final = {2: torch.int16, 4: torch.int32}


def first(recipe: Recipe) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(recipe.seed)
    random = Random(recipe.seed)
    found: dict[str, Tensor] = {}
    for name, source in sorted(recipe.sources().items()):
        tensor = _drawn(source, drawn)
        if source.flat:
            tensor.fill_(random.choice((0, 1)))
        if source.part == "order" and random.random() < 0.3:
            tensor = torch.arange(len(tensor), dtype=tensor.dtype)
        found[name] = tensor
    for name, other in equals(recipe).items():
        found[name] = found[other].clone()
    return _with_aliases(recipe, found)


def later(
    recipe: Recipe, before: Mapping[str, Tensor], version: int, fixed: frozenset[str]
) -> dict[str, Tensor]:
    """The next version: some tensors have other bits, some of them in a few elements only."""
    drawn = torch.Generator().manual_seed(recipe.seed * 7 + version)
    random = Random(f"{recipe.seed} {version}")
    sources, found = recipe.sources(), dict(before)
    wild = _wild(recipe)
    for name in sorted(found):
        if name in fixed or random.random() >= recipe.share:
            continue
        tensor = _drawn(sources[name], drawn)
        if name in wild and random.random() < 0.5:
            width = WIDTHS[tensor.element_size()]
            tensor = torch.randint(-(2**15), 2**15, tensor.shape, generator=drawn).to(width)
            tensor = tensor.view(before[name].dtype)
        if random.random() < 0.5 and sources[name].part != "order":
            few = torch.rand(tensor.shape, generator=drawn) < 0.3
            tensor = torch.where(few, tensor, before[name])
        found[name] = tensor
    if random.random() < 0.5:
        for name, base in equals(recipe).items():
            found[name] = found[base].clone()
    return _with_aliases(recipe, found)


def equals(recipe: Recipe) -> dict[str, str]:
    return {
        f"model.{number}.w{at}": f"model.{unit.equal}.w{at}"
        for number, unit in enumerate(recipe.units)
        for at in range(len(unit.rows) if unit.equal >= 0 else 0)
    }


def are_parted(recipe: Recipe, tensors: Mapping[str, Tensor]) -> bool:
    return any(not torch.equal(tensors[n], tensors[o]) for n, o in equals(recipe).items())


def other(recipe: Recipe, name: str, turn: int) -> Tensor:
    drawn = torch.Generator().manual_seed(recipe.seed * 11 + turn)
    return _drawn(recipe.sources()[name], drawn)


def _wild(recipe: Recipe) -> frozenset[str]:
    """Tensors whose bits may be any, NaNs too: nothing is computed from them."""
    related = {at for unit in recipe.units for at in (unit.tie, unit.twin)}
    if any(unit.process == "other" for unit in recipe.units):
        return frozenset()
    return frozenset(
        f"model.{number}.w{at}"
        for number, unit in enumerate(recipe.units)
        if unit.is_pure and not unit.tryable and number not in related and unit.tie < 0
        for at in range(len(unit.rows))
    )


def _drawn(source: Source, drawn: torch.Generator) -> Tensor:
    dtype = DTYPES[source.dtype]
    if source.part == "order":
        return torch.randperm(source.shape[0], generator=drawn).to(dtype)
    if dtype == torch.int8:
        return torch.randint(-100, 100, source.shape, generator=drawn).to(dtype)
    if source.part.startswith("scale"):
        return torch.rand(source.shape, generator=drawn) + 0.5
    return (torch.randn(source.shape, generator=drawn) * 0.5).to(dtype)


def _with_aliases(recipe: Recipe, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for alias, name in recipe.aliases().items():
        tensors[alias] = tensors[name].clone()
    return tensors
