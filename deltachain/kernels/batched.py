"""Decode, fold and stage changes of many tensors at once, in torch operations on any device.

The number of operations depends on neither tensors nor segments, except that live bits of
different storages are gathered and written by one operation a placement. Contents of streams are
untrusted: whatever they are, no index that is derived from them leaves its array.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from deltachain.kernels.device import INT_DTYPES, mix, signed
from deltachain.kernels.reference import PHI
from deltachain.kernels.segments import (
    ChangeBatch,
    Column,
    Field,
    PlacementTable,
    Reason,
    SegmentBatch,
    StagedChanges,
    Table,
)
from deltachain.kernels.tile_batch import TileBatch


def upload(batch: SegmentBatch | TileBatch, device: torch.device) -> Tensor:
    """Copy a batch to a device, in one copy; it is asynchronous if the buffer is page-locked."""
    return torch.from_numpy(batch.buffer).to(device, non_blocking=True)


def send(array: Table, device: torch.device) -> Tensor:
    """Copy a small table to a device, behind the work that is queued there."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def decode(batch: SegmentBatch, buffer: Tensor) -> ChangeBatch:
    """Decode all segments of a batch.

    Args:
        batch: The batch.
        buffer: Its buffer on a device, from :func:`upload`.

    Returns:
        The changes in the order of the table, and a verdict that is yet to be read.
    """
    rows = table_of(batch, buffer)
    owner = _owners(rows, Column.FIRST, batch.totals.nnz)
    rank = torch.arange(batch.totals.nnz, device=buffer.device) - rows[owner, Column.FIRST]
    verdict = torch.zeros(len(rows) - 1, dtype=torch.int32, device=buffer.device)
    if batch.layout.gap:
        offsets = _offsets(batch, buffer, rows, verdict)
        offsets = torch.minimum(offsets, rows[owner, Column.LENGTH] - 1)
    else:
        offsets = rank
    indices = offsets + rows[owner, Column.START]
    if batch.layout.absolute:
        values = _join(batch.streams(buffer)[-batch.layout.width :])
    else:
        values = _steps(batch, buffer, rows, (owner, rank), verdict)
    return ChangeBatch(
        indices=indices,
        values=values.to(INT_DTYPES[batch.layout.width]),
        absolute=batch.layout.absolute,
        kept=None,
        spans=batch.spans(),
        verdicts=((batch, verdict),),
    )


def table_of(batch: SegmentBatch, buffer: Tensor) -> Tensor:
    """Return the table in a copy of the batch's buffer."""
    return buffer[: batch.table.nbytes].view(torch.int64).view(batch.table.shape)


def _owners(rows: Tensor, column: Column, total: int) -> Tensor:
    """Return the segment of each of the ``total`` entries that a column counts."""
    return torch.repeat_interleave(rows[:, column].diff(), output_size=total)


def _since(sums: Tensor, firsts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum before each segment, and within it, from inclusive prefix sums."""
    padded = torch.cat([sums.new_zeros(1), sums])
    ends = padded[firsts]
    return ends[:-1], ends.diff()


def _refuse(verdict: Tensor, bad: Tensor, reason: Reason) -> None:
    """Give malformed segments a reason; reasons are given in ascending order."""
    verdict.masked_fill_(bad, int(reason))


def _offsets(batch: SegmentBatch, buffer: Tensor, rows: Tensor, verdict: Tensor) -> Tensor:
    """Decode gaps to ``(nnz,)`` offsets within the segments."""
    gap, counts = batch.layout.gap, batch.totals
    last = (1 << 8 * gap) - 1
    entries = _join(batch.streams(buffer)[:gap])
    given = entries != last
    owner = _owners(rows, Column.GAP, counts.gaps)
    passed = torch.cumsum(entries + given, 0)
    before, length = _since(passed, rows[:, Column.GAP])
    nth = torch.cumsum(given, 0)
    earlier, found = _since(nth, rows[:, Column.GAP])
    nnz = rows[:, Column.FIRST].diff()
    # Those that are too many go behind the end, which is cut off.
    rank = nth - 1 - earlier[owner]
    fits = given & (rank < nnz[owner])
    to = torch.where(fits, rows[owner, Column.FIRST] + rank, counts.nnz)
    offsets = torch.zeros(counts.nnz + 1, dtype=torch.int64, device=buffer.device)
    offsets.index_copy_(0, to, passed - before[owner] - 1)
    pending = verdict.clone()
    _refuse(pending, length > rows[:-1, Column.LENGTH], Reason.LENGTH)
    _refuse(pending, ~given[rows[1:, Column.GAP] - 1], Reason.LAST_GAP)
    _refuse(pending, found != nnz, Reason.GAPS)
    verdict.copy_(pending)
    return offsets[:-1]


def _steps(
    batch: SegmentBatch,
    buffer: Tensor,
    rows: Tensor,
    places: tuple[Tensor, Tensor],
    verdict: Tensor,
) -> Tensor:
    """Join ``(nnz,)`` steps as int64; the bits above the element's width are not defined."""
    width, gap, counts = batch.layout.width, batch.layout.gap, batch.totals
    sign, exception, magnitude, *planes = batch.streams(buffer)[gap:]
    owner, rank = places
    bit = rows[owner, Column.BIT] + rank
    negative = (sign[bit >> 3] >> (bit & 7)) & 1
    excepted = ((exception[bit >> 3] >> (bit & 7)) & 1).bool()
    nth = torch.cumsum(excepted, 0)
    earlier, exceptions = _since(nth, rows[:, Column.FIRST])
    at = (rows[owner, Column.EXCEPTION] + nth - 1 - earlier[owner]).clamp_(0)
    found = torch.ones_like(rank)
    if counts.exceptions:
        entry = magnitude[at.clamp_(max=counts.exceptions - 1)]
        found = torch.where(excepted, entry.to(torch.int64), found)
    largest = 255 if width > 1 else 127 + negative.to(torch.int64)
    bad = excepted & ((found < 2) | (found > largest))
    wide = excepted & (found == 255) if width > 1 else torch.zeros_like(excepted)
    nth = torch.cumsum(wide, 0)
    earlier, wides = _since(nth, rows[:, Column.FIRST])
    values = torch.where(negative.bool(), -found, found)
    off = torch.zeros_like(bad)
    if counts.wide:
        at = (rows[owner, Column.WIDE] + nth - 1 - earlier[owner]).clamp_(0, counts.wide - 1)
        whole = _join(planes)[at]
        off = wide & _is_off(whole, negative, width)
        values = torch.where(wide, whole, values)
    reasons = torch.where(bad, int(Reason.MAGNITUDE), torch.where(off, int(Reason.WIDE_STEP), 0))
    worst = torch.zeros_like(verdict).scatter_reduce_(0, owner, reasons.to(torch.int32), "amax")
    differs = wides != rows[:, Column.WIDE].diff()
    worst = torch.where(differs & (worst < Reason.WIDES), int(Reason.WIDES), worst)
    _refuse(worst, exceptions != rows[:, Column.EXCEPTION].diff(), Reason.EXCEPTIONS)
    verdict.copy_(torch.maximum(verdict, worst))
    return values


def _is_off(whole: Tensor, negative: Tensor, width: int) -> Tensor:
    """Return whether wide steps have another sign than theirs, or a magnitude below 255."""
    top = (whole >> (8 * width - 1)) & 1
    magnitude = torch.where(negative.bool(), -whole, whole)
    if width < 8:
        magnitude &= (1 << 8 * width) - 1
        return (top != negative) | (magnitude < 255)
    return (top != negative) | ((magnitude >= 0) & (magnitude < 255))


def _join(planes: Sequence[Tensor]) -> Tensor:
    """Join byte planes, the lowest first, into int64."""
    joined = planes[0].to(torch.int64)
    for k, plane in enumerate(planes[1:], 1):
        joined |= plane.to(torch.int64) << (8 * k)
    return joined


def fold(changes: Sequence[ChangeBatch]) -> ChangeBatch:
    """Combine the changes of several versions, the oldest first, as :func:`deltachain.delta.fold`.

    Tensors are numbered alike in all of them. Indices ascend in each tensor.
    """
    if len(changes) == 1:
        return changes[0]
    spans = np.concatenate([one.spans for one in changes])
    merged, bases = _merged(spans)
    base = send(bases, changes[0].indices.device)
    counts = send(spans[:, 2], base.device)
    total = int(spans[:, 2].sum())
    indices = torch.cat([one.indices for one in changes])
    keys, order = torch.sort(
        indices + base.repeat_interleave(counts, output_size=total), stable=True
    )
    values = torch.cat([one.values for one in changes])
    absolute = torch.cat([_mask(one) for one in changes])[order]
    kept = torch.cat([_kept(one) for one in changes])[order]
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


def after(bits: Tensor, start: int, tensor: int, earlier: Sequence[ChangeBatch]) -> Tensor:
    """Return consecutive bits of a tensor after some changes: these themselves if there are none.

    Args:
        bits: ``(n,)`` bits, not written.
        start: Flat index of the first one.
        tensor: Number of the tensor.
        earlier: Changes of many tensors, the oldest first.
    """
    for changes in earlier:
        for _, first, count, _ in changes.spans[changes.spans[:, 0] == tensor].tolist():
            there = slice(first, first + count)
            at = changes.indices[there] - start
            near = _kept(changes)[there] & (at >= 0) & (at < bits.numel())
            at, values = at[near], changes.values[there][near]
            bits = bits.clone()
            bits[at] = torch.where(_mask(changes)[there][near], values, bits[at] + values)
    return bits


def _merged(spans: Table) -> tuple[Table, Table]:
    """Return the spans of all versions together, and the key of each span's first element."""
    tensors, which = np.unique(spans[:, 0], return_inverse=True)
    counts = np.bincount(which, spans[:, 2], tensors.size).astype(np.int64)
    bounds = np.zeros(tensors.size, np.int64)
    np.maximum.at(bounds, which, spans[:, 3])
    merged = np.stack([tensors, np.cumsum(counts) - counts, counts, bounds], axis=1)
    return merged, (np.cumsum(bounds) - bounds)[which]


def _mask(changes: ChangeBatch) -> Tensor:
    if isinstance(changes.absolute, Tensor):
        return changes.absolute
    return torch.full(changes.indices.shape, changes.absolute, device=changes.indices.device)


def _kept(changes: ChangeBatch) -> Tensor:
    if changes.kept is not None:
        return changes.kept
    return torch.ones(changes.indices.shape, dtype=torch.bool, device=changes.indices.device)


def stage(changes: ChangeBatch, placements: PlacementTable, names: Sequence[str]) -> StagedChanges:
    """Find the changes in the placements of this rank, and compute their new bits; write nothing.

    Args:
        changes: Changes of tensors of one element width.
        placements: Placements of these tensors, in storages of that width.
        names: Names of the tensors, by number, for errors.

    Raises:
        MalformedError: A segment is malformed.
    """
    visits = placements.visits(changes.spans, changes.values.dtype)
    device = changes.indices.device
    placement, first, count = send(visits.T, device)
    total = int(visits[:, 2].sum())
    visit = torch.repeat_interleave(count, output_size=total)
    ends = torch.cumsum(count, 0)
    change = torch.arange(total, device=device) + (first - ends + count)[visit]
    row = placement[visit]
    inside, positions = _locate(changes, placements, row, change)
    sums = torch.cumsum(inside, 0)
    found = _since(sums, torch.cat([ends.new_zeros(1), ends]))[1]
    counts = read_counts(changes, found, names)
    ended = np.cumsum(counts)
    runs = np.stack([visits[:, 0], ended - counts, ended], axis=1)
    kept = int(counts.sum())
    if kept < total:
        to = torch.where(inside, sums - 1, kept)
        positions, change, row = (_compact(x, to, kept) for x in (positions, change, row))
    old = torch.empty(kept, dtype=changes.values.dtype, device=device)
    for number, begin, end in runs.tolist():
        torch.index_select(placements.storages[number], 0, positions[begin:end], out=old[begin:end])
    new = _new_bits(changes, change, old)
    effect = _effects(placements, row, changes.indices[change], (new, old))
    return StagedChanges(positions, old, new, runs, effect, None, placements)


def _locate(
    changes: ChangeBatch, placements: PlacementTable, row: Tensor, change: Tensor
) -> tuple[Tensor, Tensor]:
    """Return which changes are in the placements, and their positions; 0 outside."""
    rows = placements.rows
    rest = changes.indices[change] - rows[row, Field.OFFSET]
    inside = rest >= 0
    if changes.kept is not None:
        inside &= changes.kept[change]
    position = rows[row, Field.AT]
    for at in range(Field.DIMS, Field.DIMS + 3 * placements.ndim, 3):
        size, there, live = rows[row, at], rows[row, at + 1], rows[row, at + 2]
        coordinate = torch.div(rest, there, rounding_mode="floor")
        rest = rest - coordinate * there
        inside &= coordinate < size
        position = position + coordinate * live
    inside &= rest == 0
    return inside, torch.where(inside, position, 0)


def read_counts(changes: ChangeBatch, found: Tensor, names: Sequence[str]) -> Table:
    """Read verdicts and ``(n,)`` counts from the device in one copy; return the counts.

    Raises:
        MalformedError: A segment is malformed.
    """
    verdicts = [verdict.to(torch.int64) for _, verdict in changes.verdicts]
    read = torch.cat([*verdicts, found]).cpu().numpy()
    split = read.size - found.numel()
    changes.check(read[:split], names)
    counts: Table = read[split:]
    return counts


def _compact(values: Tensor, to: Tensor, kept: int) -> Tensor:
    """Copy values to the given positions; those at ``kept`` are dropped."""
    out = torch.empty(kept + 1, dtype=values.dtype, device=values.device)
    return out.index_copy_(0, to, values)[:-1]


def _new_bits(changes: ChangeBatch, change: Tensor, old: Tensor) -> Tensor:
    values = changes.values[change]
    if isinstance(changes.absolute, Tensor):
        return torch.where(changes.absolute[change], values, old + values)
    return values if changes.absolute else old + values


def _effects(
    placements: PlacementTable, row: Tensor, indices: Tensor, bits: tuple[Tensor, Tensor]
) -> Tensor:
    """Sum the contributions of new and old bits to the state digest, and their number."""
    slot = placements.rows[row, Field.SLOT]
    position = indices * signed(PHI)
    sums = torch.zeros((5, placements.slots), dtype=torch.int64, device=row.device)
    for which, mine in enumerate(bits):
        extended = mine.to(torch.int64)
        if mine.element_size() < 8:
            extended &= (1 << 8 * mine.element_size()) - 1
        for lane, key in enumerate((Field.KEY0, Field.KEY1)):
            mixed = mix((position + placements.rows[row, key]) ^ extended)
            sums[2 * which + lane].index_add_(0, slot, mixed)
    sums[4].index_add_(0, slot, torch.ones_like(slot))
    return sums.T.contiguous()


def write_(staged: StagedChanges, bits: Tensor) -> None:
    """Write ``(n,)`` bits at the staged positions of all placements."""
    for number, begin, end in staged.runs.tolist():
        live = staged.placements.storages[number]
        live.index_copy_(0, staged.positions[begin:end], bits[begin:end])
