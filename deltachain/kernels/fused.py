"""Decode and stage changes of many tensors at once, in Triton kernels on a CUDA device.

A batch is decoded by one launch and staged by two; one more writes it. Live bits of different
storages are reached through a table of addresses. Results equal those of :mod:`.batched` bit for
bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from deltachain.kernels import programs
from deltachain.kernels.batched import read_counts, send, table_of
from deltachain.kernels.device import INT_DTYPES
from deltachain.kernels.segments import (
    ChangeBatch,
    PlacementTable,
    SegmentBatch,
    StagedChanges,
    Table,
)

BLOCK: Final = 512
"""Elements that a program works on at a time."""
WARPS: Final = 16
"""Warps of a program, one thread an element: with more of them a thread, ptxas spills registers."""
_BLOCKS: Final = {"BLOCK": BLOCK, "num_warps": WARPS}


def launch(program: Any, grid: int, *args: Any, **constants: Any) -> None:  # noqa: ANN401
    """Launch a Triton program ``grid`` times; every launch goes through here.

    Args:
        program: Program of :mod:`.programs`.
        grid: Number of instances; with 0, nothing is launched.
        args: Arguments of every instance.
        constants: Compile-time arguments, and the number of warps of an instance.
    """
    if grid:
        with torch.cuda.device_of(args[0]):
            program[(grid,)](*args, **constants)


def decode(batch: SegmentBatch, buffer: Tensor) -> ChangeBatch:
    """Decode all segments of a batch; see :func:`.staging.decode`."""
    layout, device = batch.layout, buffer.device
    rows = table_of(batch, buffer)
    segments, nnz = len(rows) - 1, batch.totals.nnz
    indices = torch.empty(nnz, dtype=torch.int64, device=device)
    values = torch.empty(nnz, dtype=INT_DTYPES[layout.width], device=device)
    verdict = torch.empty(segments, dtype=torch.int32, device=device)
    at = batch.offsets
    sign = layout.gap
    planes = sign + 3
    launch(
        programs.decode_segment,
        segments,
        *(buffer, rows, indices, values, verdict),
        *(at[0], at[1] - at[0], at[sign], at[sign + 1], at[sign + 2]),
        *(at[planes], at[planes + 1] - at[planes]),
        WIDTH=layout.width,
        GAP=layout.gap,
        ABSOLUTE=layout.absolute,
        **_BLOCKS,
    )
    return ChangeBatch(
        indices=indices,
        values=values,
        absolute=layout.absolute,
        kept=None,
        spans=batch.spans(),
        verdicts=((batch, verdict),),
    )


def stage(changes: ChangeBatch, placements: PlacementTable, names: Sequence[str]) -> StagedChanges:
    """Find changes in placements, and compute their new bits; see :func:`.staging.stage`."""
    visits = placements.visits(changes.spans, changes.values.dtype)
    cut, owners = _blocks(visits)
    device, grid = changes.indices.device, len(cut)
    blocks = send(cut, device)
    counts = torch.empty(grid, dtype=torch.int64, device=device)
    kept = changes.indices if changes.kept is None else changes.kept
    given = (blocks, placements.rows, changes.indices, kept)
    masked, ndim = changes.kept is not None, placements.ndim
    launch(programs.count_block, grid, *given, counts, ndim, MASKED=masked, **_BLOCKS)
    ends = torch.cumsum(counts, 0)
    found = read_counts(changes, counts, names)
    runs = _runs(visits, owners, found)
    total = int(found.sum())
    positions = torch.empty(total, dtype=torch.int64, device=device)
    old, new = (torch.empty(total, dtype=changes.values.dtype, device=device) for _ in range(2))
    sums = torch.zeros((placements.slots, 5), dtype=torch.int64, device=device)
    writes = torch.empty((grid, 3), dtype=torch.int64, device=device)
    mixed = isinstance(changes.absolute, Tensor)
    launch(
        programs.stage_block,
        grid,
        *(*given, changes.values, changes.absolute if mixed else changes.indices, ends),
        *(positions, old, new, sums, writes, ndim),
        WIDTH=changes.values.element_size(),
        ABSOLUTE=2 if mixed else int(bool(changes.absolute)),
        MASKED=masked,
        **_BLOCKS,
    )
    return StagedChanges(positions, old, new, runs, sums, writes, placements)


def _blocks(visits: Table) -> tuple[Table, Table]:
    """Cut visits into blocks: rows of placement, first change and count; and their visits."""
    cuts = -(-visits[:, 2] // BLOCK)
    owners = np.repeat(np.arange(len(visits)), cuts)
    at = BLOCK * (np.arange(owners.size) - np.repeat(np.cumsum(cuts) - cuts, cuts))
    mine = visits[owners]
    count = np.minimum(mine[:, 2] - at, BLOCK)
    return np.stack([mine[:, 0], mine[:, 1] + at, count], axis=1), owners


def _runs(visits: Table, owners: Table, found: Table) -> Table:
    """Add up what was found in each visit; return the runs."""
    counts = np.zeros(len(visits), np.int64)
    np.add.at(counts, owners, found)
    ends = np.cumsum(counts)
    return np.stack([visits[:, 0], ends - counts, ends], axis=1)


def write_(staged: StagedChanges, bits: Tensor) -> None:
    """Write ``(n,)`` bits at the staged positions of all placements."""
    if staged.blocks is None:
        raise ValueError("staged by other kernels")
    launch(
        programs.write_block, len(staged.blocks), staged.blocks, staged.positions, bits, **_BLOCKS
    )
