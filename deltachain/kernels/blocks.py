"""Blocks and batches of a diff on a device: index arithmetic in numpy.

A *block* is the unit of comparison: up to ``BLOCK`` consecutive elements of one tensor. A *batch*
is a bounded number of blocks of any tensors, compared by the same launches, so that their number
follows from the size of a model and not from its number of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from deltachain.types import Indices

BLOCK: Final = 4096
"""Elements of a block. An offset in a block takes two bytes, and its count another two."""

BATCH_NBYTES: Final = 64 << 20
"""Largest size of a batch's snapshot bits, in bytes: long enough for the full speed of a copy."""


class Span(NamedTuple):
    """Consecutive elements of one tensor, all in one batch.

    Attributes:
        start: Flat index of the first element, a multiple of ``BLOCK``.
        numel: Number of elements, at least one.
    """

    start: int
    numel: int

    @property
    def blocks(self) -> int:
        """Number of blocks; the last one may be short."""
        return -(-self.numel // BLOCK)


class BlockTable(NamedTuple):
    """Blocks of a batch, in order; three ``(blocks,)`` int64 arrays.

    Attributes:
        span: Number of the block's span in the batch.
        first: Offset of the block's first element in its span.
        numel: Number of elements.
    """

    span: Indices
    first: Indices
    numel: Indices


def batch_blocks(width: int) -> int:
    """Return the largest number of blocks in a batch of elements of ``width`` bytes."""
    return max(1, BATCH_NBYTES // (width * BLOCK))


def spans_of(numel: int, *, used: int, limit: int) -> Iterator[Span]:
    """Cut a tensor into spans that fill batches of ``limit`` blocks, the first of them in part.

    Args:
        numel: Number of elements of the tensor.
        used: Number of blocks in the open batch, less than ``limit``.
        limit: Largest number of blocks in a batch.
    """
    start, room = 0, limit - used
    while start < numel:
        span = Span(start, min(numel - start, room * BLOCK))
        yield span
        start, room = start + span.numel, limit


def block_table(numels: npt.NDArray[np.int64]) -> BlockTable:
    """Return the blocks of spans with the given ``(spans,)`` numbers of elements."""
    blocks = -(-numels // BLOCK)
    span = np.repeat(np.arange(numels.size), blocks)
    number = np.arange(span.size) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    first = number * BLOCK
    return BlockTable(span, first, np.minimum(BLOCK, numels[span] - first))


def indices_of(first: Indices, counts: npt.NDArray[Any], offsets: npt.NDArray[Any]) -> Indices:
    """Return the indices of changes.

    Args:
        first: Index of each block's first element, int64 of shape ``(blocks,)``.
        counts: Number of changes in each block, int16 of shape ``(blocks,)``.
        offsets: Offset of each change in its block, ascending, int16 of shape ``(nnz,)``.
    """
    indices: Indices = np.repeat(first, counts)
    indices += offsets
    return indices
