"""Recipes: how a library quantises a weight, and what the checkpoint then holds."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

from deltachain.errors import ConfigError
from deltachain.publish.quantise.grid import Grid
from deltachain.publish.quantise.stored import Stored
from deltachain.types import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from deltachain.kernels.quantised import Rounding

FLOATS: Final = ("BF16", "F16", "F32")
"""Wire dtypes of weights that can be quantised."""


_EXTRA: Final = "'deltachain[quantization]'"


class Margins(NamedTuple):
    """How far the blocks of a piece of a weight extend beyond it, in elements."""

    above: int
    below: int
    left: int
    right: int


class Scales(Protocol):
    """Function that makes the scales of blocks."""

    def __call__(self, amax: Tensor, global_scale: Tensor | None = None, /) -> Tensor:
        """Return the scales of the checkpoint, ``(R, C)``.

        Args:
            amax: Largest magnitude of each block, ``(R, C)`` in the dtype of the weight.
            global_scale: That of the checkpoint, ``(1,)``, if the recipe has one.
        """


class Codes(Protocol):
    """Function that makes codes."""

    def __call__(
        self, weight: Tensor, amax: Tensor, margins: Margins, global_scale: Tensor | None = None, /
    ) -> Tensor:
        """Return the codes of a piece of a weight, as the checkpoint holds them.

        Args:
            weight: The piece, ``(N, K)``; it begins and ends between stored codes.
            amax: Largest magnitude of each of its blocks, of the whole block, ``(R, C)``.
            margins: How far its blocks extend beyond it.
            global_scale: That of the checkpoint, ``(1,)``, if the recipe has one.
        """


class Multipliers(Protocol):
    """Function that tells what codes are multiplied by."""

    def __call__(
        self, amax: Tensor, scales: Tensor, global_scale: Tensor | None = None, /
    ) -> Tensor:
        """Return what the codes of each block are multiplied by, ``(R, C)`` in fp32."""


def _scales_themselves(amax: Tensor, scales: Tensor, global_scale: Tensor | None = None) -> Tensor:
    del amax, global_scale
    return scales.float()


def _made_by_others(config: Mapping[str, Any]) -> None:
    del config


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Functions of a library, each of which imports it. All are pure.

    Attributes:
        scales: See :class:`Scales`.
        codes: See :class:`Codes`.
        config: From the names of layers that are not quantised, to ``quantization_config``.
        global_scale: From the largest magnitude of the matrices that engines load into one with a
            weight, ``(1,)`` in the dtype of the weight, to the global scale of the checkpoint,
            ``(1,)``.
        multipliers: See :class:`Multipliers`; a version in which one is not positive and finite is
            refused.
        factors: From the largest magnitudes and the scales of blocks to what ``rounding`` divides
            or multiplies by, ``(R, C)`` in fp32.
        rounding: How the host kernel makes the same codes of bf16 weights; None if it cannot.
        ignored: From the ``quantization_config`` of a checkpoint to the layers that are not
            quantised, as entries of ``Quantization.ignore``; None if another recipe made it.
    """

    scales: Scales
    codes: Codes
    config: Callable[[Sequence[str]], dict[str, Any]]
    global_scale: Callable[[Tensor], Tensor] | None = None
    multipliers: Multipliers = _scales_themselves
    factors: Callable[[Tensor, Tensor], Tensor] = _scales_themselves
    rounding: Rounding | None = None
    ignored: Callable[[Mapping[str, Any]], tuple[str, ...] | None] = _made_by_others


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A way to quantise the weight of a linear layer.

    Attributes:
        name: Name in ``PublishConfig`` and in the table of a chain.
        library: Distribution with the arithmetic; its version is part of a chain's identity.
        codes: The tensor of codes. One element of it has the codes of ``block[1]`` columns.
        scales: The tensor of scales; a block of the weight is what shares one.
        global_scale: The tensor of the scale that all scales are divided or multiplied by, if the
            library has one; as engines need it, the same for matrices that they load into one.
        smallest: Smallest positive number of a code.
        whole_blocks: Whether the library refuses a matrix whose last columns are no whole block.
        arithmetic: Functions of the library; ``global_scale`` is there if the tensor is.

    Raises:
        ConfigError: The tensors do not fit one another.
    """

    name: str
    library: str
    codes: Stored
    scales: Stored
    global_scale: Stored | None = None
    smallest: float
    whole_blocks: bool = False
    arithmetic: Arithmetic

    def __post_init__(self) -> None:
        (rows, columns), width = self.codes.block, self.scales.block[1]
        if rows != 1 or columns < 1 or width % columns or (columns > 1 and not self.whole_blocks):
            raise ConfigError(
                f"recipe {self.name}: codes of {rows} rows and {columns} columns in one element, "
                f"and a scale every {width or 'all'} columns",
                hint="codes of one row that share an element share a scale, in whole blocks",
            )
        if (self.global_scale is None) != (self.arithmetic.global_scale is None):
            raise ConfigError(
                f"recipe {self.name}: a global scale is a tensor and a function",
                hint="give both, or neither",
            )

    @property
    def tensors(self) -> tuple[Stored, ...]:
        """Tensors of the checkpoint that a weight becomes."""
        both = self.codes, self.scales
        return (*both, self.global_scale) if self.global_scale else both

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a weight that share a scale; 0 for all."""
        return self.scales.block

    @property
    def has_kernel(self) -> bool:
        """Whether kernels make the codes of bf16 weights."""
        return self.arithmetic.rounding is not None

    @property
    def rounding(self) -> Rounding:
        """How kernels make the codes; only of a recipe that has one."""
        return cast("Rounding", self.arithmetic.rounding)

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
                hint=f"pip install {self.library if '.' in self.name else _EXTRA}",
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
