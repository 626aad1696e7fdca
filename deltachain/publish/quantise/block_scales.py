"""Scales and factors of blocks as tables by largest magnitude.

A library computes the scale of a block from its largest magnitude alone, a bf16 number, of which
there are 32,640. It is asked once for all of them: a kernel then takes each factor from a table
while the block is in the cache, and has the library's bits, whatever device it runs on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

from deltachain.kernels.device import INT_DTYPES, on_host
from deltachain.publish.quantise.recipe import Recipe

MAGNITUDES: Final = 1 << 15
"""Rows of a table: all bits of a bf16 magnitude."""

FINITE: Final = 0x7F80
"""Bits of infinity: those of finite magnitudes are below."""


@dataclass(frozen=True, slots=True)
class BlockScales:
    """What a recipe makes of each largest magnitude.

    Attributes:
        scales: Scales of the checkpoint, of shape ``(32768,)``; any where there is no factor.
        factors: What codes are multiplied or divided by, fp32 of shape ``(32768,)``; 0 for
            magnitudes that are refused: not finite, or without a positive finite scale.
    """

    scales: Tensor
    factors: Tensor

    def scales_of(self, amax: Tensor) -> Tensor:
        """Return the scales of blocks with the given largest magnitudes, in bf16.

        A magnitude that is not finite has a scale of NaN.
        """
        return _taken(self.scales, amax)

    def factors_of(self, amax: Tensor) -> Tensor:
        """Return the factors of such blocks."""
        return _taken(self.factors, amax)


def magnitude_bits(amax: Tensor) -> Tensor:
    """Return the bits of bf16 magnitudes, as indices into a table."""
    return amax.view(torch.int16).long() & (MAGNITUDES - 1)


def _taken(table: Tensor, amax: Tensor) -> Tensor:
    """Return the row of each magnitude, as bits; numpy on the host, where torch asks all cores."""
    bits, at = table.view(INT_DTYPES[table.element_size()]), magnitude_bits(amax)
    taken = torch.from_numpy(bits.numpy()[at.numpy()]) if on_host(amax) else bits[at]
    return taken.view(table.dtype)


@cache
def block_scales(recipe: Recipe, where: torch.device) -> BlockScales:
    """Return the tables of a recipe on a device, where they stay: a diff does not copy them."""
    if where.type != "cpu":
        made = block_scales(recipe, torch.device("cpu"))
        return BlockScales(made.scales.to(where), made.factors.to(where))
    return _asked(recipe)


def _asked(recipe: Recipe) -> BlockScales:
    """Ask the library of a recipe for all magnitudes."""
    amax = torch.arange(FINITE, dtype=torch.int16).view(torch.bfloat16).view(-1, 1)
    made = recipe.arithmetic.scales(amax)
    given = recipe.arithmetic.factors(amax, made).view(-1)
    scales = made.new_empty(MAGNITUDES)
    scales.view(torch.uint8).fill_(0xFF)  # NaN in every dtype of scales
    scales.view(torch.uint8).view(MAGNITUDES, -1)[:FINITE] = made.view(torch.uint8).view(FINITE, -1)
    values = made.view(-1).float()
    factors = torch.zeros(MAGNITUDES)
    factors[:FINITE] = torch.where(torch.isfinite(values) & (values > 0), given, factors[:FINITE])
    return BlockScales(scales, factors)
