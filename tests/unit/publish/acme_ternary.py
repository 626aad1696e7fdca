"""The recipe of another package, in one file: weights of -1, 0 and 1, four in a byte.

``test_quantise_refusals.py`` installs it, and nothing in deltachain knows of it.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from deltachain.publish.quantise import Arithmetic, Margins, Recipe, Stored

WIDTH: Final = 8
"""Columns that share a scale."""


def scales(amax: Tensor, global_scale: Tensor | None = None, /) -> Tensor:
    """Return scales as a share of the largest of all, in 8 bits."""
    assert global_scale is not None
    return (amax.float() / global_scale * 255).ceil().clamp(1, 255).to(torch.uint8)


def multipliers(amax: Tensor, stored: Tensor, global_scale: Tensor | None = None, /) -> Tensor:
    """Return what -1 and 1 stand for in each block."""
    del amax
    assert global_scale is not None
    return stored.float() / 255 * global_scale


def codes(
    weight: Tensor, amax: Tensor, margins: Margins, global_scale: Tensor | None = None, /
) -> Tensor:
    """Return the codes of a piece, 2 bits each, that of the first column lowest."""
    factors = multipliers(amax, scales(amax, global_scale), global_scale)
    spread = factors.repeat_interleave(WIDTH, 1)[:, margins.left :][:, : weight.shape[1]]
    signs = (weight.float() / spread).round().clamp(-1, 1).to(torch.int16) % 4
    four = signs.view(weight.shape[0], -1, 4)
    return (four << torch.arange(0, 8, 2)).sum(2).to(torch.uint8)


def dense(stored: dict[str, Tensor], layer: str) -> Tensor:
    """Return the weight of a layer of a checkpoint."""
    packed, factors = stored[f"{layer}.ternary"], stored[f"{layer}.ternary_scale"]
    signs = (packed[:, :, None].to(torch.int16) >> torch.arange(0, 8, 2)) & 3
    signs = torch.where(signs == 3, -1, signs).view(packed.shape[0], -1).float()
    over = stored[f"{layer}.ternary_over"]
    return signs * (factors.float() / 255 * over).repeat_interleave(WIDTH, 1)


def config(ignored: Sequence[str]) -> dict[str, Any]:
    """Return what engines would read."""
    return {"quant_method": "acme", "leave": list(ignored)}


def largest(amax: Tensor) -> Tensor:
    """Return the global scale."""
    return amax.float().clamp(min=1e-30)


TERNARY: Final = Recipe(
    name="acme.ternary",
    library="acme_ternary",
    codes=Stored("ternary", "U8", (1, 4)),
    scales=Stored("ternary_scale", "U8", (1, WIDTH)),
    global_scale=Stored("ternary_over", "F32", (0, 0), is_single=True),
    smallest=1.0,
    whole_blocks=True,
    arithmetic=Arithmetic(
        scales=scales, codes=codes, config=config, global_scale=largest, multipliers=multipliers
    ),
)
