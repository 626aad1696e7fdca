"""Weights in host memory: codes, their diff and largest magnitudes by kernels on all cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltachain.kernels import host
from deltachain.kernels.device import INT_DTYPES, host_array, on_host
from deltachain.kernels.quantised import WindowBlocks
from deltachain.kernels.reference import Changes
from deltachain.publish.model.layout import Box
from deltachain.publish.quantise.recipe import Grid, Recipe
from deltachain.threads import Pool, cores
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import Bits

if TYPE_CHECKING:
    from deltachain.kernels.codes import WeightBits


# A library computes the scale of a block from its largest magnitude alone, a bf16 number, of which
# there are 32,640. It is asked once for all of them: a kernel then takes each factor from a table
# while the block is in the cache, and has the library's bits, whatever device it runs on.


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


LEAST: Final = 1 << 20
"""Elements of a thread, below which starting it costs more than it saves."""

_BITS: Final = {torch.bfloat16: np.uint16, torch.float32: np.uint32}

_T = TypeVar("_T")


def can_make(where: torch.device) -> bool:
    """Return whether the kernels take windows there: on the host, with numba."""
    return where.type == "cpu" and str(host.NAME) == "numba"


def amax(values: Tensor, grid: Grid, window: Box) -> Tensor:
    """Find the largest magnitude of each block of a window, bf16 or fp32, in bf16.

    See :func:`.amax.window_amax`.
    """
    from deltachain.kernels.codes import block_amax  # noqa: PLC0415 - numba is slow to import

    bits, blocks = _bits(values), blocks_of(grid, window)

    def find(rows: slice) -> npt.NDArray[np.uint16]:
        found = np.zeros(grid.counts(window), np.uint16)
        block_amax(bits[rows], _below(blocks, rows), found[_lines(blocks, rows)])
        return found

    pieces = _in_threads(find, _cuts(values.shape[0], values.numel()))
    return _magnitudes(np.maximum.reduce(pieces))


def make(values: Tensor, grid: Grid, window: Box, factors: Tensor, recipe: Recipe) -> Tensor:
    """Make the codes of a window of finite values.

    Args:
        values: The window, ``(rows, columns)``, in bf16, or in fp32 to be cast to it.
        grid: WindowBlocks of the matrix.
        window: Position of the window.
        factors: Factor of each block of the window.
        recipe: How to quantise.
    """
    from deltachain.kernels.codes import quantise_codes  # noqa: PLC0415 - numba is slow to import

    bits, blocks = _bits(values), blocks_of(grid, window)
    table, rounding = np.ascontiguousarray(factors.numpy()), recipe.rounding
    out = np.empty(values.shape, np.uint8)

    def fill(rows: slice) -> None:
        lines = table[_lines(blocks, rows)]
        quantise_codes(bits[rows], lines, _below(blocks, rows), rounding, out[rows])

    _in_threads(fill, _cuts(values.shape[0], values.numel()))
    return torch.from_numpy(out).view(TORCH_DTYPES[recipe.codes.dtype])


def diff_(
    snapshot: Bits,
    values: Tensor,
    grid: Grid,
    window: Box,
    shared: Tensor,
    recipe: Recipe,
) -> tuple[Changes, Tensor]:
    """Find the codes of a window that differ from a snapshot, and copy them there.

    Args:
        snapshot: Flat bits of the window's codes.
        values: The window, ``(rows, columns)``, in bf16, or in fp32 to be cast to it.
        grid: WindowBlocks of the matrix.
        window: Position of the window.
        shared: Largest magnitudes so far of the window's blocks, in bf16: of what other ranks have
            of them, or 0.
        recipe: How to quantise.

    Returns:
        The changes, and the largest magnitudes of all blocks; if one of these has no factor, there
        are no changes, and the snapshot is as it was.
    """
    from deltachain.kernels.codes import BlockFactors, codes_diff_  # noqa: PLC0415 - as above

    bits, blocks = _bits(values), blocks_of(grid, window)
    tables, rounding = block_scales(recipe, values.device), recipe.rounding
    found = shared.clone()
    whole = not grid.given[0]  # a block has rows of several threads
    if whole:
        found = torch.maximum(found, amax(values, grid, window))
        if not bool((tables.factors_of(found) > 0).all()):
            return _joined([]), found
    most, columns = _unsigned(found), values.shape[1]

    def find(rows: slice) -> tuple[Changes, bool]:
        part = snapshot[rows.start * columns : rows.stop * columns]
        factors = BlockFactors(most[_lines(blocks, rows)], tables.factors.numpy(), whole)
        return codes_diff_(part, bits[rows], factors, _below(blocks, rows), rounding)

    height = 1 if whole else grid.block[0]
    cuts = _cuts(values.shape[0], values.numel(), height, blocks.at[0])
    pieces = _in_threads(find, cuts)
    changes = [
        Changes(one.indices + rows.start * columns, one.old, one.new)
        for (one, _), rows in zip(pieces, cuts, strict=True)
    ]
    if all(accepted for _, accepted in pieces):
        return _joined(changes), found
    for one in changes:
        host.scatter_(snapshot, one.indices, one.old)
    return _joined([]), torch.maximum(found, amax(values, grid, window))


def blocks_of(grid: Grid, window: Box) -> WindowBlocks:
    """Return where the blocks of a window are."""
    (above, _), (left, _) = grid.margins(window)
    return WindowBlocks((above, left), grid.block)


def _below(blocks: WindowBlocks, rows: slice) -> WindowBlocks:
    """Return where the blocks of some rows of a window are."""
    return blocks._replace(at=((blocks.at[0] + rows.start) % blocks.size[0], blocks.at[1]))


def _lines(blocks: WindowBlocks, rows: slice) -> slice:
    """Return the rows of blocks that some rows of a window are in."""
    first = (blocks.at[0] + rows.start) // blocks.size[0]
    return slice(first, (blocks.at[0] + rows.stop - 1) // blocks.size[0] + 1)


def _joined(several: Sequence[Changes]) -> Changes:
    if len(several) == 1:
        return several[0]
    none = np.empty(0, np.uint8)
    columns = zip(Changes(np.empty(0, np.int64), none, none), *several, strict=True)
    return Changes(*(np.concatenate(column) for column in columns))


def _magnitudes(bits: npt.NDArray[np.uint16]) -> Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _unsigned(magnitudes: Tensor) -> npt.NDArray[np.uint16]:
    """Return the bits of magnitudes; shares memory."""
    bits: npt.NDArray[np.uint16] = magnitudes.view(torch.int16).numpy().view(np.uint16)
    return bits


def _bits(values: Tensor) -> WeightBits:
    found: WeightBits = host_array(values.detach().contiguous(), _BITS[values.dtype])
    return found


def _in_threads(work: Callable[[slice], _T], cuts: Sequence[slice]) -> list[_T]:
    if len(cuts) == 1:
        return [work(cuts[0])]
    with Pool(len(cuts)) as pool:
        return list(pool.map(work, cuts))


def _cuts(rows: int, numel: int, height: int = 1, above: int = 0) -> list[slice]:
    """Divide rows evenly among the cores, at least ``LEAST`` elements each.

    Args:
        rows: Number of rows.
        numel: Number of elements of all of them.
        height: Rows of a block: it is divided nowhere.
        above: Rows of the first block that precede the first row.
    """
    blocks = -(-(above + rows) // height)
    count = max(1, min(cores(), numel // LEAST, blocks))
    bounds = [min(rows, max(0, blocks * n // count * height - above)) for n in range(count + 1)]
    return [slice(low, high) for low, high in pairwise(bounds)]
