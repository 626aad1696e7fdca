"""Matrices in windows: codes and scales are those of the library, whatever a rank holds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deltachain.publish.model.layout import Box, ElementMap
from deltachain.publish.model.source import ModelTensors, Weight
from deltachain.publish.quantise import recipe as grid
from deltachain.publish.quantise import tensors as amax
from deltachain.publish.quantise.compressed import INT8_ROW
from deltachain.publish.quantise.recipe import Recipe
from deltachain.publish.quantise.settings import RECIPES
from deltachain.publish.quantise.tensors import quantise
from deltachain.publish.ranks.collectives import Ranks
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import TensorSpec
from tests.unit.publish.library import BLOCKS, blocks, compressed, differing

NAME: Final = "layer.weight"

OTHER_WAYS: Final = [
    f"{name} by {way}"
    for name in sorted(RECIPES)
    if RECIPES[name].arithmetic.rounding
    for way in ("torch", "its library")
]

Make: TypeAlias = Callable[[tuple[int, int], torch.Generator], Tensor]


def normal(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * 0.02


def heavy(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """As trained weights are: rows of very different size, outliers, zeros of both signs."""
    values = normal(shape, generator) * torch.logspace(-3, 1, shape[0])[:, None]
    values[torch.rand(shape, generator=generator) < 0.001] *= 60
    values[torch.rand(shape, generator=generator) < 0.02] = 0.0
    values[torch.rand(shape, generator=generator) < 0.02] = -0.0
    return values


def fitting(recipe: Recipe, columns: int) -> int:
    """The number of columns, or the next one that the recipe takes."""
    return -(-columns // recipe.block[1]) * recipe.block[1] if recipe.whole_blocks else columns


def extreme(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """The largest and the smallest numbers, beside zeros; every block has a large one."""
    values = torch.zeros(shape)
    choice = torch.rand(shape, generator=generator)
    signs = torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0)
    values[choice < 0.3] = 1e-38
    values[choice < 0.2] = torch.finfo(torch.bfloat16).tiny / 8
    values[choice < 0.1] = torch.finfo(torch.bfloat16).max
    return values * signs


def zeros(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Blocks and rows without anything."""
    values = normal(shape, generator)
    values[: shape[0] // 2] = 0
    return values


def ties(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Numbers of fp4 and of fp8, and those halfway between two; every block has the largest."""
    values = torch.randint(-48, 49, shape, generator=generator) / 8
    values[:, ::16] = 6.0
    return values


def every_bit(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Every finite bf16 number below 2, in any order."""
    bits = torch.arange(0x4000, dtype=torch.int16)
    both = torch.cat([bits, bits - 0x8000]).view(torch.bfloat16).float()
    at = torch.randint(0, both.numel(), shape, generator=generator)
    return both[at]


def library(recipe: Recipe, values: Tensor) -> dict[str, Tensor]:
    if recipe.name in BLOCKS:
        codes, scales = blocks(values, recipe.name)
        return {NAME: codes, f"{NAME}_scale_inv": scales}
    model = nn.Module()
    model.layer = nn.Linear(values.shape[1], values.shape[0], bias=False, dtype=values.dtype)
    model.layer.weight.data.copy_(values)
    return compressed(model, recipe.name, ())


def windows(
    shape: tuple[int, int], dice: random.Random, recipe: Recipe = INT8_ROW
) -> Iterator[Box]:
    """Boxes that tile a matrix, cut anywhere between stored codes."""
    cuts = [
        sorted({0, full, *(dice.randrange(full // by + 1) * by for _ in range(3))})
        for full, by in zip(shape, recipe.codes.block, strict=True)
    ]
    for top, bottom in zip(cuts[0], cuts[0][1:], strict=False):
        for left, right in zip(cuts[1], cuts[1][1:], strict=False):
            yield Box(shape, (top, left), (bottom - top, right - left))


def in_windows(recipe: Recipe, values: Tensor, boxes: list[Box]) -> dict[str, Tensor]:
    """Codes and scales of a matrix of which each window is a weight of its own."""
    wire = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[values.dtype]
    spec = TensorSpec(NAME, wire, tuple(values.shape))
    weights = []
    for number, box in enumerate(boxes):
        (top, left), (rows, columns) = box.offset, box.shape
        part = values[top : top + rows, left : left + columns].contiguous()
        live = TensorSpec(f"part {number}", wire, spec.shape)
        weights.append(Weight(live, part, frozen=False, element_map=ElementMap.straight(spec, box)))
    source = ModelTensors(
        tuple(weights), (spec,), {}, lambda: ((one.spec.name, one.tensor) for one in weights)
    )
    made = quantise(source, {NAME}, recipe, Ranks.alone())
    made.agree("test")
    whole = {one.name: np.zeros(one.numel, one.bits_dtype) for one in made.specs}
    for weight in made.live_weights():
        bits = weight.tensor.contiguous().view(-1).view(torch.uint8).numpy()
        (window,) = weight.element_map.windows(1 << 30)
        at = window.indices
        there = slice(at.start, at.stop) if isinstance(at, range) else at
        whole[window.spec.name][there] = bits.view(whole[window.spec.name].dtype)
    found = {}
    for one in made.specs:
        tensor = torch.from_numpy(whole[one.name].view(np.uint8)).view(TORCH_DTYPES[one.dtype])
        found[one.name] = tensor.view(one.shape)
    return found


@pytest.mark.parametrize("make", [normal, heavy, extreme, zeros, ties, every_bit])
@pytest.mark.parametrize("recipe", [*sorted(RECIPES), *OTHER_WAYS])
def test_windows_are_quantised_as_the_library_quantises_the_whole(
    recipe: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "BAND_NUMEL", 5000)  # several bands in a window
    monkeypatch.setattr(amax, "MESSAGE_NBYTES", 64)  # several messages
    name, _, way = recipe.partition(" by ")
    chosen = RECIPES[name]
    if way == "torch":
        monkeypatch.setattr(amax, "has_kernel", lambda _: False)
    elif way:
        chosen = replace(chosen, arithmetic=replace(chosen.arithmetic, rounding=None))
    for seed, (rows, columns) in enumerate([(300, 280), (128, 256), (77, 410), (1, 600), (257, 1)]):
        dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        shape = rows, fitting(chosen, columns)
        values = make(shape, generator).bfloat16()
        if recipe.startswith("mx"):
            values *= 0.25  # no exponent of 8 bits is that of the largest numbers
        expected = library(chosen, values)
        assert all(one.float().isfinite().all() for one in expected.values())
        whole = [Box.whole(shape)]
        assert differing(in_windows(chosen, values, whole), expected) == set(), shape
        parts = list(windows(shape, dice, chosen))
        assert differing(in_windows(chosen, values, parts), expected) == set(), parts


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_weights_of_other_dtypes(recipe: str, dtype: torch.dtype) -> None:
    chosen = RECIPES[recipe]
    shape = 200, fitting(chosen, 150)
    values = heavy(shape, torch.Generator().manual_seed(1)).to(dtype)
    parts = list(windows(shape, random.Random(1), chosen))
    assert differing(in_windows(chosen, values, parts), library(chosen, values)) == set()
