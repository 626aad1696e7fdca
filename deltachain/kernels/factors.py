"""Factors of a window that is quantised while it is compared on a device.

Here are the codes in torch operations, which define the results there, and the columns that blocks
of the diff have in their table for the kernels in Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltachain.kernels.quantised import Rounding
from deltachain.types import Indices

BlockShape: TypeAlias = tuple[int, int]
"""Rows and columns of a block; 0 for all of the matrix."""

LARGEST = 448.0
"""Largest number of fp8 e4m3."""


class Quantising(NamedTuple):
    """What the weights of a lane have in common, if they are quantised.

    Attributes:
        rounding: How a weight and its factor make a code.
        block: Rows and columns of a block.
    """

    rounding: Rounding
    block: BlockShape


class Factors(NamedTuple):
    """Factors of the blocks of a window.

    Attributes:
        values: Factor of each block, fp32 of shape ``(R, C)``, contiguous, where the weights are.
        columns: Columns of the window.
        at: Row and column of the window's first weight in its first block.
        how: How the window is quantised.
    """

    values: Tensor
    columns: int
    at: tuple[int, int]
    how: Quantising

    def of(self, start: int, numel: int) -> Tensor:
        """Return the factor of each of ``numel`` consecutive weights of the window."""
        index = torch.arange(start, start + numel, device=self.values.device)
        row, column = index // self.columns + self.at[0], index % self.columns + self.at[1]
        height, width = self.how.block
        line = row // height if height else torch.zeros_like(row)
        return self.values[line, column // width if width else torch.zeros_like(column)]


def codes_by_factors(weights: Tensor, factors: Factors, start: int) -> Tensor:
    """Make the codes of consecutive weights of a window in torch operations.

    Args:
        weights: Flat weights, bf16, or fp32 masters of bf16 ones.
        factors: Factors of the window; a factor of 0 gives any codes.
        start: Position of the first weight in the window.

    Returns:
        Bits of the codes, uint8 of the shape of the weights.
    """
    by, number = factors.of(start, weights.numel()), weights.to(torch.bfloat16).float()
    rounding = factors.how.rounding
    is_product = rounding == "fp8-multiply"
    number = number * by if is_product else (number / by).to(torch.bfloat16).float()
    if rounding == "int8-divide":
        return number.clamp_(-128.0, 127.0).round_().to(torch.int8).view(torch.uint8)
    if rounding == "fp8-divide":
        number += 0.0  # as adding a zero point does: -0.0 becomes 0.0
    return number.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


COLUMNS = ("factors", "row", "column", "columns", "left", "width")
"""Of a block of a diff: address of the factors, row of the first weight in its first block of
factors, its column in the window, columns of the window, columns of the first block before the
window, and blocks in a row of blocks."""


def block_columns(
    spans: Sequence[tuple[Factors, int]], span: Indices, first: Indices
) -> list[npt.NDArray[np.int64]]:
    """Return what kernels need to find the factors of each block of a diff.

    Args:
        spans: Factors of each span's window, and the position of its first weight there.
        span: Number of each block's span, int64 of shape ``(blocks,)``.
        first: Offset of each block's first weight in its span, int64 of shape ``(blocks,)``.

    Returns:
        A ``(blocks,)`` array for each of ``COLUMNS``.
    """
    rows = [
        (f.values.data_ptr(), f.at[0], f.columns, f.at[1], f.values.shape[1], start)
        for f, start in spans
    ]
    address, above, columns, left, width, start = np.array(rows, np.int64).T[:, span]
    place = start + first
    return [address, above + place // columns, place % columns, columns, left, width]
