"""Codes by the kernel and by few torch operations: bit for bit those of the libraries."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from deltachain.publish.model.layout import Box
from deltachain.publish.quantise import tensors
from deltachain.publish.quantise.recipe import Grid, Recipe
from deltachain.publish.quantise.settings import RECIPES
from deltachain.publish.quantise.tensors import make_codes


def both(recipe: Recipe, values: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of a whole matrix by the kernel and by the library, as bytes; torch has the same."""
    grid, window = Grid((values.shape[0], values.shape[1]), recipe.block), Box.whole(values.shape)
    ours = make_codes(recipe, values, grid, window, amax)
    library = make_codes(by_library(recipe), values, grid, window, amax)
    assert ours.dtype == library.dtype
    with mock.patch.object(tensors, "has_kernel", return_value=False):
        in_torch = make_codes(recipe, values, grid, window, amax)
    assert torch.equal(in_torch.view(torch.uint8), ours.view(torch.uint8))
    return ours.view(torch.uint8), library.view(torch.uint8)


def by_library(recipe: Recipe) -> Recipe:
    return replace(recipe, arithmetic=replace(recipe.arithmetic, rounding=None))


def every_number() -> Tensor:
    """Every finite bf16 number, ascending in magnitude, by turns of both signs."""
    positive = torch.arange(0x7F80, dtype=torch.int32)
    both = torch.stack([positive, positive - 0x8000], 1).flatten().to(torch.int16)
    return both.view(torch.bfloat16)


@pytest.mark.parametrize("recipe", ["int8-row", "fp8-row"])
def test_every_number_under_many_scales_of_rows(recipe: str) -> None:
    numbers = every_number()
    rows = numbers[513::97, None].abs()
    values = numbers[None].expand(rows.shape[0], -1)
    values = torch.where(values.abs() <= rows, values, torch.tensor(0.0, dtype=torch.bfloat16))
    for part in torch.arange(rows.shape[0]).split(64):
        ours, library = both(RECIPES[recipe], values[part].contiguous(), rows[part])
        assert torch.equal(ours, library)


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-block-ue8m0", "fp8-tensor"])
def test_every_number_under_many_scales_of_blocks(recipe: str) -> None:
    numbers = every_number()
    chosen = RECIPES[recipe]
    for bound in numbers[2049::1531].abs():
        below = numbers[numbers.abs() <= bound]
        at = torch.randint(0, below.numel(), (128, 128), generator=torch.Generator().manual_seed(1))
        values = below[at].contiguous()
        values[0, 0] = bound
        amax = bound.view(1, 1)
        if not chosen.arithmetic.factors(amax, chosen.arithmetic.scales(amax)).isfinite().all():
            continue  # refused before
        ours, library = both(chosen, values, amax)
        assert torch.equal(ours, library), float(bound)
