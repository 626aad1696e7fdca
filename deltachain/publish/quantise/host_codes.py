"""Weights in host memory: codes, their diff and largest magnitudes by kernels on all cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltachain.kernels import host
from deltachain.kernels.reference import Changes
from deltachain.publish.model.layout import Box
from deltachain.publish.quantise.block_scales import BlockScales
from deltachain.publish.quantise.grid import Grid
from deltachain.publish.quantise.recipe import Recipe
from deltachain.threads import Pool, cores
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import Bits

if TYPE_CHECKING:
    from deltachain.kernels.codes import Blocks, WeightBits

LEAST: Final = 1 << 20
"""Elements of a thread, below which starting it costs more than it saves."""

_BITS: Final = {torch.bfloat16: (torch.int16, np.uint16), torch.float32: (torch.int32, np.uint32)}

_T = TypeVar("_T")


def can_make(values: Tensor) -> bool:
    """Return whether the kernels take a window: bf16 or masters of it, on the host, with numba."""
    is_fast = str(host.NAME) == "numba"
    return values.dtype in _BITS and values.device.type == "cpu" and is_fast


def amax(values: Tensor, grid: Grid, window: Box) -> Tensor:
    """Find the largest magnitude of each block of a window in bf16; see :func:`.window_amax`."""
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
        values: The window, ``(rows, columns)``.
        grid: Blocks of the matrix.
        window: Position of the window.
        factors: Factor of each block of the window.
        recipe: How to quantise.
    """
    from deltachain.kernels.codes import quantise_codes  # noqa: PLC0415 - numba is slow to import

    bits, blocks = _bits(values), blocks_of(grid, window)
    table, rounding = np.ascontiguousarray(factors.numpy()), recipe.arithmetic.rounding
    out = np.empty(values.shape, np.uint8)

    def fill(rows: slice) -> None:
        lines = table[_lines(blocks, rows)]
        quantise_codes(bits[rows], lines, _below(blocks, rows), rounding, out[rows])

    _in_threads(fill, _cuts(values.shape[0], values.numel()))
    return torch.from_numpy(out).view(TORCH_DTYPES[recipe.codes])


def diff_(
    snapshot: Bits,
    values: Tensor,
    grid: Grid,
    window: Box,
    shared: Tensor,
    tables: BlockScales,
    recipe: Recipe,
) -> tuple[Changes | None, Tensor]:
    """Find the codes of a window that differ from a snapshot, and copy them there.

    Args:
        snapshot: Flat bits of the window's codes.
        values: The window, ``(rows, columns)``.
        grid: Blocks of the matrix.
        window: Position of the window.
        shared: Largest magnitudes so far of the window's blocks, in bf16: of what other ranks have
            of them, or 0.
        tables: Factors by largest magnitude.
        recipe: How to quantise.

    Returns:
        The changes, or ``None`` if a block has no factor, and the snapshot is then as it was; and
        the largest magnitudes of all blocks.
    """
    from deltachain.kernels.codes_diff import codes_diff_  # noqa: PLC0415 - as above

    bits, blocks = _bits(values), blocks_of(grid, window)
    table, rounding = tables.factors.numpy(), recipe.arithmetic.rounding
    found = shared.clone()
    whole = not grid.given[0]  # a block has rows of several threads, or all of one
    if whole:
        found = torch.maximum(found, amax(values, grid, window))
        if not bool((tables.factors_of(found) > 0).all()):
            return None, found
    most, columns = _unsigned(found), values.shape[1]

    def find(rows: slice) -> Changes | None:
        part = snapshot[rows.start * columns : rows.stop * columns]
        at = _below(blocks, rows)
        lines = most[_lines(blocks, rows)]
        return codes_diff_(part, bits[rows], lines, table, at, rounding, known=whole)

    height = 1 if whole else grid.block[0]
    cuts = _cuts(values.shape[0], values.numel(), height, blocks.at[0])
    pieces = _in_threads(find, cuts)
    changes = [
        one._replace(indices=one.indices + rows.start * columns)
        for one, rows in zip(pieces, cuts, strict=True)
        if one is not None
    ]
    if len(changes) < len(pieces):
        for one in changes:
            host.scatter_(snapshot, one.indices, one.old)
        return None, amax(values, grid, window)
    joined = changes[0] if len(changes) == 1 else _joined(changes)
    return joined, found


def blocks_of(grid: Grid, window: Box) -> Blocks:
    """Return where the blocks of a window are."""
    from deltachain.kernels.codes import Blocks  # noqa: PLC0415 - as above

    (above, _), (left, _) = grid.margins(window)
    return Blocks((above, left), grid.block)


def _below(blocks: Blocks, rows: slice) -> Blocks:
    """Return where the blocks of some rows of a window are."""
    return blocks._replace(at=((blocks.at[0] + rows.start) % blocks.size[0], blocks.at[1]))


def _lines(blocks: Blocks, rows: slice) -> slice:
    """Return the rows of blocks that some rows of a window are in."""
    first = (blocks.at[0] + rows.start) // blocks.size[0]
    return slice(first, (blocks.at[0] + rows.stop - 1) // blocks.size[0] + 1)


def _joined(several: Sequence[Changes]) -> Changes:
    return Changes(*(np.concatenate(column) for column in zip(*several, strict=True)))


def _magnitudes(bits: npt.NDArray[np.uint16]) -> Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _unsigned(magnitudes: Tensor) -> npt.NDArray[np.uint16]:
    """Return the bits of magnitudes; shares memory."""
    bits: npt.NDArray[np.uint16] = magnitudes.view(torch.int16).numpy().view(np.uint16)
    return bits


def _bits(values: Tensor) -> WeightBits:
    signed, unsigned = _BITS[values.dtype]
    bits: Any = values.detach().contiguous().view(signed).numpy().view(unsigned)
    found: WeightBits = bits
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
