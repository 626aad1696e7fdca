"""Diff of weights on a device against a snapshot on the host or on that device.

Tensors are compared in batches of blocks. A snapshot on the host is copied to the device a batch at
a time on a stream of its own, each while earlier batches are compared; tensors that lie side by
side in the snapshot cross in one copy. Changes are compacted on the device. The stream of the
caller is waited for once, when all batches are enqueued. Then exactly the changes are copied back:
two bytes for the offset of each in its block and its new bits, and its old bits too if the snapshot
is not on the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from deltachain.kernels import host
from deltachain.kernels.blocks import indices_of
from deltachain.kernels.copy_stream import CopyStream
from deltachain.kernels.lane import Compared, Lane, LaneKind, Launched, TensorSpan, runs
from deltachain.kernels.reference import Changes
from deltachain.types import BITS_DTYPES, Bits, Indices


class Landed(NamedTuple):
    """Changes of a batch, on the host.

    Attributes:
        batch: The batch.
        nnz: Number of changes.
        room: Whether there was room for them; the arrays are empty if not.
        counts: Number of changes of each block, int16 of shape ``(blocks,)``.
        columns: Offset of each change in its block, new bits, and old bits if they are not on the
            host; each of shape ``(nnz,)``.
    """

    batch: Launched
    nnz: int
    room: bool
    counts: npt.NDArray[Any]
    columns: tuple[npt.NDArray[Any], ...]


class DeviceDiff:
    """Diffs of weights on one device; its buffers are kept from one diff to the next.

    Call ``add`` for every tensor, then ``settle``; use from one thread and one stream at a time.

    Args:
        where: Device of the weights.
        fused: Whether to use the kernels in Triton, rather than torch operations.
    """

    def __init__(self, where: torch.device, *, fused: bool) -> None:
        self.fused = fused
        self.streams = CopyStream(where)
        self.lanes: dict[LaneKind, Lane] = {}

    def expect(self, kind: LaneKind, numel: int) -> None:
        """Announce ``numel`` more elements of a kind in every diff, so that there is room."""
        self._lane(kind).numel += numel

    def add(self, tensor: Compared) -> None:
        """Compare a tensor, now or with those that follow; its memory must stay as it is."""
        self._lane(tensor.kind).add(tensor)

    def drop(self) -> None:
        """Forget the tensors that are not being compared yet."""
        for lane in self.lanes.values():
            lane.drop()

    def settle(self, found: MutableMapping[str, Changes]) -> None:
        """Wait for the changes of all tensors since the last call, and update the snapshot.

        Args:
            found: Receives the changes of each tensor that has any, by name.
        """
        for lane in self.lanes.values():
            lane.flush()
        landed = self._land([batch for lane in self.lanes.values() for batch in lane.take()])
        changes: dict[str, list[Changes]] = defaultdict(list)
        for first in landed:
            one = first
            if not one.room:  # seldom, and large: one at a time
                (one,) = self._land([one.batch.lane.redo(one.batch, one.nnz)])
            for name, some in _changes_of(one):
                changes[name].append(some)
        for lane in self.lanes.values():
            lane.fit(sum(one.nnz for one in landed if one.batch.lane is lane))
        for name, several in changes.items():
            found[name] = several[0] if len(several) == 1 else _joined(several)

    def _lane(self, kind: LaneKind) -> Lane:
        if kind not in self.lanes:
            self.lanes[kind] = Lane(kind, self.streams, self.fused)
        return self.lanes[kind]

    def _land(self, launched: Sequence[Launched]) -> list[Landed]:
        """Wait for batches, and copy their changes to the host."""
        if not launched:
            return []
        streams, placed = self.streams, [batch.placed for batch in launched]
        with streams.computing():
            counts = streams.receive(torch.cat([one.counts for one in placed])).numpy()
            headers = streams.receive(torch.stack([one.header for one in placed])).numpy()
        # The only wait for the caller's stream, unless a batch had no room.
        streams.wait(streams.mark())
        used: dict[int, int] = defaultdict(int)
        for one, (start, nnz, _) in zip(placed, headers.tolist(), strict=True):
            used[id(one.arena)] = max(used[id(one.arena)], start + nnz if start >= 0 else 0)
        arenas = {id(one.arena): one.arena for one in placed}
        with streams.copying():
            arrived = {
                key: [streams.receive(column[: used[key]]).numpy() for column in arena.columns]
                for key, arena in arenas.items()
            }
            copied = streams.mark_copies()
        streams.wait(copied)
        ends = np.cumsum([batch.table.numel.size for batch in launched]).tolist()
        landed = []
        for batch, end, (start, nnz, _) in zip(launched, ends, headers.tolist(), strict=True):
            mine = slice(start, start + nnz) if start >= 0 else slice(0, 0)
            columns = tuple(column[mine] for column in arrived[id(batch.placed.arena)])
            blocks = counts[end - batch.table.numel.size : end]
            landed.append(Landed(batch, nnz, start >= 0, blocks, columns))
        return landed


def _changes_of(landed: Landed) -> list[tuple[str, Changes]]:
    """Return the changes of each span of a batch, after an update of a snapshot on the host."""
    spans, table = landed.batch.spans, landed.batch.table
    if not landed.nnz:
        return []
    offsets, new, *rest = landed.columns
    dtype = BITS_DTYPES[new.itemsize]
    first = np.array([one.at for one in spans], np.int64)[table.span] + table.first
    positions = indices_of(first, landed.counts, offsets)
    # Number of changes before each span, and after the last.
    edges = np.searchsorted(table.span, np.arange(len(spans) + 1))
    before = np.concatenate(([0], np.cumsum(landed.counts, dtype=np.int64)))[edges]
    bits = new.view(dtype)
    old = rest[0].view(dtype) if rest else _update_host(spans, before, positions, bits)
    return [
        (
            one.tensor.name,
            Changes(positions[low:high] - one.tensor.at, old[low:high], bits[low:high]),
        )
        for one, low, high in zip(spans, before[:-1].tolist(), before[1:].tolist(), strict=True)
        if low < high
    ]


def _update_host(
    spans: Sequence[TensorSpan],
    before: npt.NDArray[np.int64],
    positions: Indices,
    new: Bits,
) -> Bits:
    """Write new bits into a snapshot on the host; return the old ones."""
    old, number = np.empty_like(new), 0
    for run in runs(spans):
        mine = slice(int(before[number]), int(before[number + run.spans]))
        kept = run.kept.numpy().view(new.dtype)
        old[mine] = host.gather(kept, positions[mine])
        host.scatter_(kept, positions[mine], new[mine])
        number += run.spans
    return old


def _joined(several: Sequence[Changes]) -> Changes:
    """Join the changes of the spans of a tensor, in order."""
    ordered = sorted(several, key=lambda changes: int(changes.indices[0]))
    return Changes(*(np.concatenate(column) for column in zip(*ordered, strict=True)))
