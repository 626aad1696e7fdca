"""Codes by the kernel on the host, and in torch operations: bit for bit those of the libraries."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deltachain.kernels.factors import Factors, Quantising, codes_by_factors
from deltachain.publish.model.layout import Box
from deltachain.publish.quantise import host_codes
from deltachain.publish.quantise.recipe import Grid, Recipe
from deltachain.publish.quantise.settings import RECIPES
from deltachain.publish.quantise.tensors import make_codes


def both(recipe: Recipe, values: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of a whole matrix by the kernel and by the library, as bytes; torch has the same."""
    shape = (values.shape[0], values.shape[1])
    grid, window = Grid(shape, recipe.block), Box.whole(shape)
    factors = recipe.arithmetic.factors(amax, recipe.arithmetic.scales(amax))
    kernel = host_codes.make(values, grid, window, factors, recipe)
    library = make_codes(recipe, values, grid, window, amax)
    assert kernel.dtype == library.dtype
    how = Quantising(recipe.rounding, recipe.block)
    in_torch = codes_by_factors(values.view(-1), Factors(factors, shape[1], (0, 0), how), 0)
    assert torch.equal(in_torch.view(shape), kernel.view(torch.uint8))
    return kernel.view(torch.uint8), library.view(torch.uint8)


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
        kernel, library = both(RECIPES[recipe], values[part].contiguous(), rows[part])
        assert torch.equal(kernel, library)


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
        kernel, library = both(chosen, values, amax)
        assert torch.equal(kernel, library), float(bound)


def quickest(*calls: Callable[[], object]) -> list[float]:
    """Least seconds of each call, taken by turns."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(30):
        for call, found in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    return [min(found) for found in seconds]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [n for n in sorted(RECIPES) if RECIPES[n].has_kernel])
def test_the_kernel_takes_less_time(recipe: str) -> None:
    chosen, shape = RECIPES[recipe], (1024, 1536)
    values = (torch.randn(shape) * 0.02).bfloat16()
    grid, window = Grid(shape, chosen.block), Box.whole(shape)
    amax = torch.full(grid.shape, 0.11, dtype=torch.bfloat16)
    factors = chosen.arithmetic.factors(amax, chosen.arithmetic.scales(amax))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        kernel, library = quickest(
            lambda: host_codes.make(values, grid, window, factors, chosen),
            lambda: make_codes(chosen, values, grid, window, amax),
        )
    finally:
        torch.set_num_threads(threads)
    print(f"{recipe}: kernel {kernel:.5f} s, library {library:.5f} s")  # noqa: T201
    assert kernel < library
