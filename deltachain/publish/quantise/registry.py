"""Registry of recipes by name: built-in ones, and those of installed packages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from typing_extensions import override

from deltachain.errors import ConfigError
from deltachain.name_registry import NameRegistry
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

GROUP: Final = "deltachain.recipes"
"""Entry point group of recipes; each object is a :class:`Recipe`."""


class RecipeRegistry(Mapping[str, Recipe]):
    """Recipes by name. Those of other packages are imported when exactly their name is met.

    Args:
        recipes: Built-in recipes.
    """

    def __init__(self, recipes: Iterable[Recipe]) -> None:
        self._registry = NameRegistry(GROUP, Recipe, "acme.ternary", recipes)

    @override
    def __getitem__(self, name: str) -> Recipe:
        found = self._registry.find(name)
        if found is None:
            raise KeyError(name)
        return found

    @override
    def __iter__(self) -> Iterator[str]:
        return self._registry.names()

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)

    def register(self, recipe: Recipe) -> None:
        """Register a recipe of another package in this process.

        Raises:
            ConfigError: The name is taken, or has no dot: such names are reserved for deltachain.
        """
        self._registry.register(recipe)

    def chosen(self, name: str) -> Recipe:
        """Return the recipe chosen by a user.

        Raises:
            ConfigError: There is none of that name, or it cannot be loaded.
        """
        found = self._registry.find(name)
        if found is not None:
            return found
        failure = self._registry.failure(name)
        if failure is not None:
            raise ConfigError(f"quantization={name!r}: {failure}", hint="repair that package")
        raise ConfigError(
            f"quantization={name!r}: no such recipe",
            hint=f"expected one of: {', '.join(sorted(self))}; other recipes come with packages",
        )


RECIPES: Final = RecipeRegistry(
    (FP8_BLOCK, FP8_BLOCK_UE8M0, FP8_ROW, FP8_TENSOR, INT8_ROW, MXFP4, MXFP8, NVFP4A16)
)
"""All recipes."""
