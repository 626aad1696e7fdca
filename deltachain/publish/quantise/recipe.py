"""Recipes: how a library quantises a weight, and what the checkpoint then holds."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from deltachain.errors import ConfigError
from deltachain.publish.quantise.grid import Grid
from deltachain.types import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from deltachain.kernels.quantised import Rounding

FLOATS: Final = ("BF16", "F16", "F32")
"""Wire dtypes of weights that can be quantised."""


class Margins(NamedTuple):
    """How far the blocks of a piece of a weight extend beyond it, in elements."""

    above: int
    below: int
    left: int
    right: int


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Functions of a library, each of which imports it. All are pure.

    Attributes:
        scales: From the largest magnitude of each block, ``(R, C)`` in the dtype of the weight, to
            the scales of the checkpoint, ``(R, C)``.
        codes: From a piece of a weight, ``(N, K)``, the largest magnitude of each of its blocks,
            ``(R, C)``, and its margins, to codes, ``(N, K)``.
        factors: From the largest magnitudes and the scales of blocks to what ``rounding`` divides
            or multiplies by, ``(R, C)`` in fp32.
        rounding: How the host kernel makes the same codes of bf16 weights.
        config: From the names of layers that are not quantised, to ``quantization_config``.
    """

    scales: Callable[[Tensor], Tensor]
    codes: Callable[[Tensor, Tensor, Margins], Tensor]
    factors: Callable[[Tensor, Tensor], Tensor]
    rounding: Rounding
    config: Callable[[Sequence[str]], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A way to quantise the weight of a linear layer.

    Attributes:
        name: Name in ``PublishConfig`` and in the table of a chain.
        library: Distribution with the arithmetic; its version is part of a chain's identity.
        block: Rows and columns that share a scale; 0 for all.
        codes: Wire dtype of codes; they have the name and shape of the weight.
        scales: Wire dtype of scales; that of the weight if empty.
        suffix: Name of the scales in their layer.
        is_single: Whether the scales have the shape ``(1,)``, and not that of the grid.
        arithmetic: Functions of the library.
    """

    name: str
    library: str
    block: tuple[int, int]
    codes: str
    scales: str = ""
    suffix: str = "weight_scale"
    is_single: bool = False
    arithmetic: Arithmetic

    def version(self) -> str:
        """Return the installed version of the library.

        Raises:
            ConfigError: It is not installed.
        """
        try:
            return importlib.metadata.version(self.library)
        except importlib.metadata.PackageNotFoundError as exc:
            raise ConfigError(
                f"quantization={self.name!r} needs {self.library}, which is not installed",
                hint="pip install 'deltachain[quantization]'",
            ) from exc

    def grid(self, spec: TensorSpec) -> Grid:
        """Return the blocks of a weight."""
        rows, columns = spec.shape
        return Grid((rows, columns), self.block)

    def codes_of(self, spec: TensorSpec) -> TensorSpec:
        """Return the tensor of codes of a weight."""
        return TensorSpec(spec.name, self.codes, spec.shape)

    def scales_of(self, spec: TensorSpec) -> TensorSpec:
        """Return the tensor of scales of a weight."""
        shape = (1,) if self.is_single else self.grid(spec).shape
        return TensorSpec(self.scales_name(spec.name), self.scales or spec.dtype, shape)

    def scales_name(self, weight: str) -> str:
        """Return the name of the scales of a weight, ``LAYER.weight``."""
        return f"{weight.removesuffix('weight')}{self.suffix}"

    def record(self) -> Mapping[str, str]:
        """Return what identifies the recipe in the table of a chain."""
        return {"recipe": self.name, "library": self.library, "version": self.version()}
