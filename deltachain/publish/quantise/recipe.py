"""Recipes: how a library quantises a weight, and what the checkpoint then holds."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from deltachain.errors import ConfigError
from deltachain.publish.model.layout import Box
from deltachain.types import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

FLOATS: Final = ("BF16", "F16", "F32")  # wire dtypes of weights that can be quantised

BAND_NUMEL: Final = 1 << 20
"""Elements quantised at a time, unless a row of blocks has more: few enough to stay in caches."""

_EXTRA: Final = "'deltachain[quantization]'"

_WEIGHT: Final = "weight"


class Band(NamedTuple):
    """Consecutive rows of a window, and the rows of its blocks.

    ``before`` and ``after`` are the rows of the first and last blocks that are outside the band.
    """

    rows: slice
    blocks: slice
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Grid:
    """Blocks of a matrix that share a scale; a rank's *window* of the matrix may cut some."""

    full: tuple[int, int]
    given: tuple[int, int]

    @property
    def block(self) -> tuple[int, int]:
        return self.given[0] or max(1, self.full[0]), self.given[1] or max(1, self.full[1])

    @property
    def shape(self) -> tuple[int, int]:
        (n, k), (rows, columns) = self.full, self.block
        return -(-n // rows), -(-k // columns)

    def first(self, window: Box) -> tuple[int, int]:
        return window.offset[0] // self.block[0], window.offset[1] // self.block[1]

    def counts(self, window: Box) -> tuple[int, int]:
        """Return the rows and columns of blocks with elements in a window."""
        ends = [-(-(at + n) // b) for at, n, b in self._dims(window)]
        (row, column), empty = self.first(window), not window.numel
        return (0, 0) if empty else (ends[0] - row, ends[1] - column)

    def margins(self, window: Box) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return how far the blocks extend beyond a window: above and below, left and right.

        Blocks at the end of the matrix count as whole. A dimension of which a block has all has no
        margins.
        """
        rows, columns = (
            (at % b, -(at + n) % b) if given else (0, 0)
            for given, (at, n, b) in zip(self.given, self._dims(window), strict=True)
        )
        return rows, columns

    def cut(self, window: Box) -> npt.NDArray[np.bool_]:
        """Return which blocks of a window have elements outside it, in the shape of ``counts``."""
        sides = []
        for count, first, full, (at, n, b) in zip(
            self.counts(window), self.first(window), self.full, self._dims(window), strict=True
        ):
            starts = (np.arange(count) + first) * b
            sides.append((starts < at) | (np.minimum(starts + b, full) > at + n))
        return np.logical_or.outer(sides[0], sides[1])

    def owned(self, window: Box) -> Box:
        """Return the blocks whose first element is in a window, as a box of the grid."""
        starts = [-(-at // b) for at, _, b in self._dims(window)]
        stops = [-(-(at + n) // b) for at, n, b in self._dims(window)]
        counts = [max(0, stop - start) for start, stop in zip(starts, stops, strict=True)]
        if not (window.numel and math.prod(counts)):
            return Box(self.shape, (0, 0), (0, 0))
        return Box(self.shape, (starts[0], starts[1]), (counts[0], counts[1]))

    def bands(self, window: Box) -> Iterator[Band]:
        """Yield all rows of a window in bands of about ``BAND_NUMEL`` elements, of whole blocks."""
        if not window.numel:
            return
        (rows, columns), (above, below) = window.shape, self.margins(window)[0]
        height, limit = self.block[0], max(1, BAND_NUMEL // columns)
        if not self.given[0]:
            for low in range(0, rows, limit):
                yield Band(slice(low, min(low + limit, rows)), slice(0, 1), 0, 0)
            return
        step, count = max(1, limit // height), self.counts(window)[0]
        for first in range(0, count, step):
            last = min(first + step, count)
            low, high = max(0, first * height - above), min(last * height - above, rows)
            after = below if last == count else 0
            yield Band(slice(low, high), slice(first, last), 0 if first else above, after)

    def _dims(self, window: Box) -> Iterator[tuple[int, int, int]]:
        yield from zip(window.offset, window.shape, self.block, strict=True)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the checkpoint that a weight becomes, in part.

    Each of its elements is of one block of the weight: a code of one element, a byte of two codes
    side by side, a scale of all elements that share it.

    Attributes:
        suffix: Its name in the layer; ``weight`` if it has that of the weight.
        dtype: Its wire dtype; that of the weight if empty.
        block: Rows and columns of the weight that an element is of; 0 for all.
        is_single: Whether it has the shape ``(1,)``, and not that of its grid.
    """

    suffix: str
    dtype: str = ""
    block: tuple[int, int] = (1, 1)
    is_single: bool = False

    def name(self, weight: str) -> str:
        """Return its name in the checkpoint, beside a weight called ``LAYER.weight``."""
        if self.suffix == _WEIGHT:
            return weight
        return f"{weight.removesuffix(_WEIGHT)}{self.suffix}"

    def grid(self, weight: TensorSpec) -> Grid:
        """Return the blocks of a weight, one for each of its elements."""
        rows, columns = weight.shape
        return Grid((rows, columns), self.block)

    def spec(self, weight: TensorSpec) -> TensorSpec:
        """Return its name, wire dtype and shape."""
        shape = (1,) if self.is_single else self.grid(weight).shape
        return TensorSpec(self.name(weight.name), self.dtype or weight.dtype, shape)

    def box(self, weight: TensorSpec, window: Box) -> Box:
        """Return the elements that are published by a rank with a window of the weight.

        They are of the blocks whose first element is in the window: windows that tile the weight
        publish every element once.
        """
        owned = self.grid(weight).owned(window)
        if not self.is_single:
            return owned
        return Box((1,), (0,), (min(1, owned.numel),))


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


Rounding: TypeAlias = Literal["int8-divide", "fp8-divide", "fp8-multiply"]
"""Code of ``x``: int8 or fp8 e4m3 of ``bf16(x / factor)``, or fp8 e4m3 of ``x * factor``."""

_LARGEST: Final = 448.0  # largest number of fp8 e4m3


def rounded(rounding: Rounding, weight: Tensor, factors: Tensor) -> Tensor:
    """Make the codes of bf16 weights with fewer operations than the library, and the same bits."""
    import torch  # noqa: PLC0415 - a recipe is named without it

    number = weight.float()
    if rounding == "fp8-multiply":
        return number.mul_(factors).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    number = number.div_(factors).to(torch.bfloat16)
    if rounding == "int8-divide":
        return number.clamp_(-128.0, 127.0).round_().to(torch.int8)
    number += 0.0  # as adding a zero point does: -0.0 becomes 0.0
    return number.clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)


def _scales_themselves(amax: Tensor, scales: Tensor, global_scale: Tensor | None = None) -> Tensor:
    del amax, global_scale
    return scales.float()


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
        rounding: How a kernel or few operations make the same codes of bf16 weights; None if they
            cannot.
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
    ignored: Callable[[Mapping[str, Any]], tuple[str, ...] | None] = lambda _: None


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
