"""Decode tiles of many tensors at once, in Triton kernels on a CUDA device.

Elements of each tile are listed by class first, some tiles at a time, so that the lists take
bounded memory; then ranks are read, and taken to elements through the lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deltachain.kernels import tile_triton
from deltachain.kernels.batched import send
from deltachain.kernels.device import INT_DTYPES
from deltachain.kernels.fused import BLOCK, WARPS, launch
from deltachain.kernels.segments import ChangeBatch, Column, Table
from deltachain.kernels.tile_batch import TileBatch, TileColumn, TileReason

LISTED: Final = 1 << 26
"""Elements that are listed at a time: 256 MiB."""


def decode_tiles(batch: TileBatch, buffer: Tensor, olds: Sequence[Tensor]) -> ChangeBatch:
    """Decode all tiles of a batch.

    Args:
        batch: The batch.
        buffer: Its buffer on the device of the weights.
        olds: ``(n,)`` old bits of each tensor of the batch, contiguous, on that device, from flat
            index ``grid.start`` on.

    Returns:
        The changes, those of a segment in no order. Errors are not raised yet. Segments of which no
        tile is wanted are not read.

    Raises:
        ValueError: There are fewer old bits of a tensor than its tiles need.
    """
    if any(o.numel() < n or o.stride() != (1,) for o, n in zip(olds, batch.lengths, strict=True)):
        raise ValueError("old bits do not cover the tiles")
    device, segments = buffer.device, len(batch.complete)
    rows_at, classes_at, bytes_at, end = batch.offsets
    table = buffer[: batch.table.nbytes].view(torch.int64).view(batch.table.shape)
    rows = buffer[rows_at : rows_at + batch.rows.nbytes].view(torch.int64).view(batch.rows.shape)
    classes, words = buffer[classes_at:bytes_at], buffer[bytes_at:end].view(torch.uint64)
    addresses = send(np.array([old.data_ptr() for old in olds], np.int64), device)
    nnz = int(batch.table[-1, Column.FIRST])
    indices = torch.zeros(nnz, dtype=torch.int64, device=device)
    values = torch.zeros(nnz, dtype=INT_DTYPES[batch.width], device=device)
    cursors = torch.zeros(segments, dtype=torch.int32, device=device)
    verdict = torch.zeros(segments, dtype=torch.int32, device=device)
    sizes = batch.rows[:, TileColumn.ROWS] * batch.rows[:, TileColumn.WIDTH]
    for first, stop in _chunks(sizes):
        mine, count = sizes[first:stop], stop - first
        firsts = send(np.cumsum(mine) - mine, device)
        listed = torch.empty(int(mine.sum()), dtype=torch.int32, device=device)
        shape = count, tile_triton.MOST_CLASSES
        bounds = torch.empty(shape, dtype=torch.int32, device=device)
        given = (addresses, firsts, listed, bounds)
        launch(
            tile_triton.list_tile,
            count,
            *(rows[first:stop], classes, *given, values),
            WIDTH=batch.width,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
        launch(
            tile_triton.read_tile,
            count,
            *(rows[first:stop], table, classes, words, *given, indices, values, cursors, verdict),
            WIDTH=batch.width,
            num_warps=1,
        )
    counts = table[:, Column.FIRST].diff()
    complete = send(batch.complete.astype(np.int64), device) > 0
    wrong = (cursors > counts) | (complete & (cursors != counts))
    verdict = verdict.masked_fill(wrong & (verdict == 0), int(TileReason.RANKS))
    owner = torch.repeat_interleave(counts, output_size=nnz)
    rank = torch.arange(nnz, device=device) - table[owner, Column.FIRST]
    return ChangeBatch(
        indices=indices,
        values=values,
        absolute=False,
        kept=rank < cursors[owner],
        spans=batch.spans(),
        verdicts=((batch, verdict),),
    )


def _chunks(sizes: Table) -> Iterator[tuple[int, int]]:
    """Yield first and last of consecutive tiles, some millions of elements together."""
    ends = np.cumsum(sizes)
    number = (ends - 1) // LISTED
    bounds = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(sizes)]
    yield from ((a, b) for a, b in pairwise(bounds) if a < b)
