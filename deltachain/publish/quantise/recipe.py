"""Recipes: how a library quantises a weight, and what the checkpoint then holds."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from deltachain.errors import ConfigError
from deltachain.publish.quantise.grid import Grid
from deltachain.publish.quantise.stored import Stored
from deltachain.types import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from deltachain.kernels.codes import Rounding

FLOATS: Final = ("BF16", "F16", "F32")
"""Wire dtypes of weights that can be quantised."""


class Margins(NamedTuple):
    """How far the blocks of a piece of a weight extend beyond it, in elements."""

    above: int
    below: int
    left: int
    right: int


def _alone(scales: Tensor) -> Tensor:
    """Return what codes are multiplied by, if scales are numbers of their dtype."""
    return scales.float()


def _as_divisors(amax: Tensor, scales: Tensor) -> Tensor:
    """Return what a kernel divides by, if the library divides by scales."""
    del amax
    return scales.float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Functions of a library, each of which imports it. All are pure.

    Attributes:
        scales: From the largest magnitude of each block, ``(R, C)`` in the dtype of the weight, to
            the scales of the checkpoint, ``(R, C)``.
        codes: From a piece of a weight, ``(N, K)``, the largest magnitude of each of its blocks,
            ``(R, C)``, and its margins, to codes, ``(N, K)``.
        config: From the names of layers that are not quantised, to ``quantization_config``.
        multipliers: From the scales of the checkpoint to what the codes of each block are
            multiplied by, ``(R, C)`` in fp32.
        factors: From the largest magnitudes and the scales of blocks to what ``rounding`` divides
            or multiplies by, ``(R, C)`` in fp32.
        rounding: How the host kernel makes the same codes of bf16 weights; None if it cannot.
    """

    scales: Callable[[Tensor], Tensor]
    codes: Callable[[Tensor, Tensor, Margins], Tensor]
    config: Callable[[Sequence[str]], dict[str, Any]]
    multipliers: Callable[[Tensor], Tensor] = _alone
    factors: Callable[[Tensor, Tensor], Tensor] = _as_divisors
    rounding: Rounding | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A way to quantise the weight of a linear layer.

    Attributes:
        name: Name in ``PublishConfig`` and in the table of a chain.
        library: Distribution with the arithmetic; its version is part of a chain's identity.
        codes: The tensor of codes.
        scales: The tensor of scales; a block of the weight is what shares one.
        smallest: Smallest positive number of a code.
        arithmetic: Functions of the library.
    """

    name: str
    library: str
    codes: Stored
    scales: Stored
    smallest: float
    arithmetic: Arithmetic

    @property
    def tensors(self) -> tuple[Stored, ...]:
        """Tensors of the checkpoint that a weight becomes."""
        return self.codes, self.scales

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a weight that share a scale; 0 for all."""
        return self.scales.block

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

    def grid(self, weight: TensorSpec) -> Grid:
        """Return the blocks of a weight that share a scale."""
        return self.scales.grid(weight)

    def specs(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        """Return the tensors of the checkpoint that a weight becomes."""
        return tuple(stored.spec(weight) for stored in self.tensors)

    def record(self) -> Mapping[str, str]:
        """Return what identifies the recipe in the table of a chain."""
        return {"recipe": self.name, "library": self.library, "version": self.version()}
