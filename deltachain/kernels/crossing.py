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
from deltachain.kernels.lane import Compared, Flight, Lane, LaneKind, Part, runs
from deltachain.kernels.reference import Changes
from deltachain.types import BITS_DTYPES, Bits, Indices


class Landed(NamedTuple):
    """Changes of a batch, on the host.

    Attributes:
        flight: The batch.
        nnz: Number of changes.
        room: Whether there was room for them; the arrays are empty if not.
        counts: Number of changes of each block, int16 of shape ``(blocks,)``.
        columns: Offset of each change in its block, new bits, and old bits if they are not on the
            host; each of shape ``(nnz,)``.
    """

    flight: Flight
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
        landed = self._land([flight for lane in self.lanes.values() for flight in lane.take()])
        changes: dict[str, list[Changes]] = defaultdict(list)
        for one in landed:
            batch = one
            if not one.room:  # seldom, and large: one at a time
                again = one.flight.lane.redo(one.flight, one.nnz)
                (batch,) = self._land([again])
            for name, part in _changes_of(batch):
                changes[name].append(part)
        for lane in self.lanes.values():
            lane.fit(sum(one.nnz for one in landed if one.flight.lane is lane))
        for name, parts in changes.items():
            found[name] = parts[0] if len(parts) == 1 else _joined(parts)

    def _lane(self, kind: LaneKind) -> Lane:
        if kind not in self.lanes:
            self.lanes[kind] = Lane(kind, self.streams, self.fused)
        return self.lanes[kind]

    def _land(self, flights: Sequence[Flight]) -> list[Landed]:
        """Wait for batches, and copy their changes to the host."""
        if not flights:
            return []
        streams, placed = self.streams, [flight.placed for flight in flights]
        with streams.computing():
            counts = streams.receive(torch.cat([one.counts for one in placed])).numpy()
            headers = streams.receive(torch.stack([one.header for one in placed])).numpy()
        streams.wait(
            streams.mark()
        )  # for the comparison: the caller's stream is never waited for again
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
        streams.wait(copied)  # for the changes
        ends = np.cumsum([flight.table.numel.size for flight in flights]).tolist()
        landed = []
        for flight, end, (start, nnz, _) in zip(flights, ends, headers.tolist(), strict=True):
            mine = slice(start, start + nnz) if start >= 0 else slice(0, 0)
            columns = tuple(column[mine] for column in arrived[id(flight.placed.arena)])
            blocks = counts[end - flight.table.numel.size : end]
            landed.append(Landed(flight, nnz, start >= 0, blocks, columns))
        return landed


def _changes_of(landed: Landed) -> list[tuple[str, Changes]]:
    """Return the changes of each part of a batch, after an update of a snapshot on the host."""
    parts, table = landed.flight.parts, landed.flight.table
    if not landed.nnz:
        return []
    offsets, new, *rest = landed.columns
    dtype = BITS_DTYPES[new.itemsize]
    first = np.array([part.at for part in parts], np.int64)[table.span] + table.first
    positions = indices_of(first, landed.counts, offsets)
    # Number of changes before each part, and after the last.
    edges = np.searchsorted(table.span, np.arange(len(parts) + 1))
    before = np.concatenate(([0], np.cumsum(landed.counts, dtype=np.int64)))[edges]
    bits = new.view(dtype)
    old = rest[0].view(dtype) if rest else _update_host(parts, before, positions, bits)
    return [
        (
            part.tensor.name,
            Changes(positions[low:high] - part.tensor.at, old[low:high], bits[low:high]),
        )
        for part, low, high in zip(parts, before[:-1].tolist(), before[1:].tolist(), strict=True)
        if low < high
    ]


def _update_host(
    parts: Sequence[Part],
    before: npt.NDArray[np.int64],
    positions: Indices,
    new: Bits,
) -> Bits:
    """Write new bits into a snapshot on the host; return the old ones."""
    old, number = np.empty_like(new), 0
    for run in runs(parts):
        mine = slice(int(before[number]), int(before[number + run.parts]))
        kept = run.kept.numpy().view(new.dtype)
        old[mine] = host.gather(kept, positions[mine])
        host.scatter_(kept, positions[mine], new[mine])
        number += run.parts
    return old


def _joined(parts: Sequence[Changes]) -> Changes:
    """Join the changes of the parts of a tensor, in order."""
    ordered = sorted(parts, key=lambda part: int(part.indices[0]))
    return Changes(*(np.concatenate(column) for column in zip(*ordered, strict=True)))
