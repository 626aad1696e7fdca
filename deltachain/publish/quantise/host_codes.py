"""Weights in host memory: codes and largest magnitudes by kernels instead of many passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltachain.kernels import host
from deltachain.publish.model.layout import Box
from deltachain.publish.quantise.grid import Grid
from deltachain.publish.quantise.recipe import Recipe
from deltachain.threads import Pool, cores
from deltachain.torch_names import TORCH_DTYPES

LEAST: Final = 1 << 20
"""Elements of a thread, below which starting it costs more than it saves."""


def can_make(values: Tensor) -> bool:
    """Return whether the kernels take a window: bf16, on the host, with numba."""
    is_fast = str(host.NAME) == "numba"
    return values.dtype == torch.bfloat16 and values.device.type == "cpu" and is_fast


def amax(values: Tensor, grid: Grid, window: Box) -> Tensor:
    """Find the largest magnitude of each block of a window; see :func:`.amax.window_amax`."""
    from deltachain.kernels.codes import block_amax  # noqa: PLC0415 - numba is slow to import

    (above, _), (left, _) = grid.margins(window)
    found = np.zeros(grid.counts(window), np.uint16)
    block_amax(_bits(values), (above, left), grid.block, found)
    return torch.from_numpy(found.view(np.int16)).view(torch.bfloat16)


def make(values: Tensor, grid: Grid, window: Box, factors: Tensor, recipe: Recipe) -> Tensor:
    """Make the codes of a window of finite values.

    Args:
        values: The window, ``(rows, columns)``.
        grid: Blocks of the matrix.
        window: Position of the window.
        factors: Factor of each block of the window.
        recipe: How to quantise; it has a kernel.
    """
    from deltachain.kernels.codes import quantise_codes  # noqa: PLC0415 - numba is slow to import

    (above, _), (left, _) = grid.margins(window)
    bits = _bits(values)
    table, rounding = np.ascontiguousarray(factors.numpy()), recipe.rounding
    out = np.empty(values.shape, np.uint8)

    def fill(rows: slice) -> None:
        at = above + rows.start, left
        quantise_codes(bits[rows], table, at, grid.block, rounding, out[rows])

    parts = list(_cuts(values.shape[0], values.numel()))
    with Pool(len(parts)) as pool:
        for _ in pool.map(fill, parts):
            pass
    return torch.from_numpy(out).view(TORCH_DTYPES[recipe.codes.dtype])


def _bits(values: Tensor) -> npt.NDArray[np.uint16]:
    return values.contiguous().view(torch.int16).numpy().view(np.uint16)


def _cuts(rows: int, numel: int) -> Iterator[slice]:
    """Divide rows evenly among the cores, at least ``LEAST`` elements each."""
    count = max(1, min(cores(), numel // LEAST))
    for number in range(count):
        yield slice(rows * number // count, rows * (number + 1) // count)
