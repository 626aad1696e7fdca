"""Registry of recipes, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from deltachain.publish.quantise.compressed import (
    FP8_ROW,
    FP8_TENSOR,
    INT8_ROW,
    MXFP4,
    MXFP8,
    NVFP4A16,
)
from deltachain.publish.quantise.finegrained import FP8_BLOCK, FP8_BLOCK_UE8M0
from deltachain.publish.quantise.recipe import Recipe

RECIPES: Final[Mapping[str, Recipe]] = MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            FP8_BLOCK,
            FP8_BLOCK_UE8M0,
            FP8_ROW,
            FP8_TENSOR,
            INT8_ROW,
            MXFP4,
            MXFP8,
            NVFP4A16,
        )
    }
)
"""All recipes, by name."""
