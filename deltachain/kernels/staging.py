"""From inflated streams of many tensors to changes that are staged for live weights, in Triton.

The order of calls: :func:`.segments.pack` and :func:`upload` for each batch, :func:`decode`,
:func:`fold` if there are several versions, :func:`stage`; then :func:`write_`, and :func:`undo_` to
take it back. A batch is decoded by one launch and staged by two; one more writes it. Live bits of
different storages are reached through a table of addresses.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from deltachain.kernels import host
from deltachain.kernels.segments import (
    ChangeBatch,
    PlacementTable,
    Plane,
    SegmentBatch,
    StagedChanges,
    Table,
)
from deltachain.kernels.torch_kernels import INT_DTYPES, signed
from deltachain.types import StateDigest

logger = logging.getLogger(__name__)

BLOCK: Final = 512  # elements that a program works on at a time
WARPS: Final = 16
"""Warps of a program, one thread an element: with more of them a thread, ptxas spills registers."""
_BLOCKS: Final = {"BLOCK": BLOCK, "num_warps": WARPS}


@cache
def decodes_on(device: torch.device) -> bool:
    """Return whether changes are decoded and digested on a device, tried once in a process.

    On other devices, or without Triton or a C compiler, the host does both.
    """
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    bits = np.arange(3, dtype=np.uint16)
    try:
        found = digest((1, 2), torch.from_numpy(bits.view(np.int16)).to(device))
    except Exception as exc:  # noqa: BLE001 - compilers and drivers raise errors of any kind
        logger.warning("changes of weights on %s are decoded on the host: %s", device, exc)
        return False
    return found == host.digest((1, 2), bits)


@cache
def _programs() -> Any:  # noqa: ANN401 - needs Triton
    return import_module("deltachain.kernels.staging_programs")


def launch(program: Any, grid: int, *args: Any, **constants: Any) -> None:  # noqa: ANN401
    """Launch a Triton program ``grid`` times; every launch goes through here."""
    if grid:
        with torch.cuda.device_of(args[0]):
            program[(grid,)](*args, **constants)


def allocator(device: torch.device) -> Callable[[int], Plane]:
    """Return the function that :func:`.segments.pack` takes memory with, page-locked for CUDA."""

    def allocate(nbytes: int) -> Plane:
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        found: Plane = memory.numpy()
        return found

    return allocate


def upload(batch: SegmentBatch, device: torch.device) -> Tensor:
    """Copy a batch to a device, in one copy; it is asynchronous if the buffer is page-locked."""
    return torch.from_numpy(batch.buffer).to(device, non_blocking=True)


def _send(array: Table, device: torch.device) -> Tensor:
    """Copy a small table to a device, behind the work that is queued there."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def decode(batch: SegmentBatch, buffer: Tensor) -> ChangeBatch:
    layout, device = batch.layout, buffer.device
    rows = buffer[: batch.table.nbytes].view(torch.int64).view(batch.table.shape)
    segments, nnz = len(rows) - 1, batch.totals.nnz
    indices = torch.empty(nnz, dtype=torch.int64, device=device)
    values = torch.empty(nnz, dtype=INT_DTYPES[layout.width], device=device)
    verdict = torch.empty(segments, dtype=torch.int32, device=device)
    at = batch.offsets
    sign = layout.gap
    planes = sign + 3
    launch(
        _programs().decode_segment,
        segments,
        *(buffer, rows, indices, values, verdict),
        *(layout.gap, at[0], at[1] - at[0], at[sign], at[sign + 1], at[sign + 2]),
        *(at[planes], at[planes + 1] - at[planes]),
        WIDTH=layout.width,
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


def fold(changes: Sequence[ChangeBatch]) -> ChangeBatch:
    """Combine the changes of several versions, the oldest first, as :func:`deltachain.delta.fold`.

    Tensors are numbered alike in all of them. Indices ascend in each tensor.
    """
    if len(changes) == 1:
        return changes[0]
    spans = np.concatenate([one.spans for one in changes])
    merged, bases = _merged(spans)
    base = _send(bases, changes[0].indices.device)
    counts = _send(spans[:, 2], base.device)
    total = int(spans[:, 2].sum())
    indices = torch.cat([one.indices for one in changes])
    keys, order = torch.sort(
        indices + base.repeat_interleave(counts, output_size=total), stable=True
    )
    values = torch.cat([one.values for one in changes])
    absolute = torch.cat([_each(one, one.absolute) for one in changes])[order]
    kept = torch.cat([_each(one, one.kept) for one in changes])[order]
    sums = torch.cumsum(torch.where(kept, values[order].to(torch.int64), 0), 0)
    edge = keys[1:] != keys[:-1]
    position = torch.arange(total, device=keys.device)
    one = edge.new_ones(min(total, 1))
    begin = torch.where(torch.cat([one, edge]), position, 0).cummax(0).values
    newest = torch.where(absolute & kept, position, -1).cummax(0).values
    since = torch.maximum(begin, newest)
    before = torch.cat([sums.new_zeros(1), sums])[since]
    folded = (sums - before).to(values.dtype)
    whole = newest >= begin
    return ChangeBatch(
        indices=indices[order],
        values=folded,
        absolute=whole,
        kept=torch.cat([edge, one]) & (whole | (folded != 0)),
        spans=merged,
        verdicts=tuple(pair for one in changes for pair in one.verdicts),
    )


def _merged(spans: Table) -> tuple[Table, Table]:
    """Return the spans of all versions together, and the key of each span's first element."""
    tensors, which = np.unique(spans[:, 0], return_inverse=True)
    counts = np.bincount(which, spans[:, 2], tensors.size).astype(np.int64)
    bounds = np.zeros(tensors.size, np.int64)
    np.maximum.at(bounds, which, spans[:, 3])
    merged = np.stack([tensors, np.cumsum(counts) - counts, counts, bounds], axis=1)
    return merged, (np.cumsum(bounds) - bounds)[which]


def _each(changes: ChangeBatch, given: Tensor | bool | None) -> Tensor:
    """Return a mask of the changes, from one or from what holds for all; ``None`` is true."""
    if isinstance(given, Tensor):
        return given
    everywhere = given is None or given
    return torch.full(changes.indices.shape, everywhere, device=changes.indices.device)


def stage(changes: ChangeBatch, placements: PlacementTable, names: Sequence[str]) -> StagedChanges:
    """Find the changes in the placements of this rank, and compute their new bits; write nothing.

    The device is waited for once, to read the verdict and the number of elements.
    """
    visits = placements.visits(changes.spans, changes.values.dtype)
    cut = _blocks(visits)
    device, grid = changes.indices.device, len(cut)
    blocks = _send(cut, device)
    counts = torch.empty(grid, dtype=torch.int64, device=device)
    kept = changes.indices if changes.kept is None else changes.kept
    given = (blocks, placements.rows, changes.indices, kept)
    masked, ndim = changes.kept is not None, placements.ndim
    launch(_programs().count_block, grid, *given, counts, ndim, MASKED=masked, **_BLOCKS)
    ends = torch.cumsum(counts, 0)
    verdicts = [verdict.to(torch.int64) for _, verdict in changes.verdicts]
    read = torch.cat([*verdicts, counts]).cpu().numpy()  # in one copy
    split = read.size - counts.numel()
    changes.check(read[:split], names)
    total = int(read[split:].sum())
    positions = torch.empty(total, dtype=torch.int64, device=device)
    old, new = (torch.empty(total, dtype=changes.values.dtype, device=device) for _ in range(2))
    sums = torch.zeros((placements.slots, 5), dtype=torch.int64, device=device)
    writes = torch.empty((grid, 3), dtype=torch.int64, device=device)
    mixed = isinstance(changes.absolute, Tensor)
    launch(
        _programs().stage_block,
        grid,
        *(*given, changes.values, changes.absolute if mixed else changes.indices, ends),
        *(positions, old, new, sums, writes, ndim),
        WIDTH=changes.values.element_size(),
        ABSOLUTE=2 if mixed else int(bool(changes.absolute)),
        MASKED=masked,
        **_BLOCKS,
    )
    return StagedChanges(positions, old, new, sums, writes, placements)


def _blocks(visits: Table) -> Table:
    """Cut visits into blocks: rows of placement, first change and count."""
    cuts = -(-visits[:, 2] // BLOCK)
    owners = np.repeat(np.arange(len(visits)), cuts)
    at = BLOCK * (np.arange(owners.size) - np.repeat(np.cumsum(cuts) - cuts, cuts))
    mine = visits[owners]
    count = np.minimum(mine[:, 2] - at, BLOCK)
    return np.stack([mine[:, 0], mine[:, 1] + at, count], axis=1)


DIGEST_TURNS: Final = 32  # blocks that a program digests: one addition to each lane for all


def digest(
    key: tuple[int, int], bits: Tensor, start: int = 0, indices: Tensor | None = None
) -> StateDigest:
    """Compute the state digest of ``(n,)`` elements: from ``start`` on, or at ``indices``."""
    numel = bits.numel()
    head = _send(np.array([0, 0, *map(signed, key), numel, start], np.int64), bits.device)
    launch(
        _programs().digest_blocks,
        -(-numel // (BLOCK * DIGEST_TURNS)),
        *(head, bits.contiguous(), head if indices is None else indices.contiguous()),
        WIDTH=bits.element_size(),
        AT=indices is not None,
        TURNS=DIGEST_TURNS,
        **_BLOCKS,
    )
    return StateDigest(*(lane % (1 << 64) for lane in head[:2].tolist()))


def write_(staged: StagedChanges) -> None:
    _write_(staged, staged.new)


def undo_(staged: StagedChanges) -> None:
    _write_(staged, staged.old)


def _write_(staged: StagedChanges, bits: Tensor) -> None:
    program, blocks = _programs().write_block, staged.blocks
    launch(program, len(blocks), blocks, staged.positions, bits, **_BLOCKS)
