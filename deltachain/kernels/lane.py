"""Batches of tensors of one kind on one device, on their way through a diff."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deltachain.kernels import device
from deltachain.kernels.blocks import BLOCK, BlockTable, Span, batch_blocks, block_table, spans_of
from deltachain.kernels.compact import Arena, Placed, diff_batch_
from deltachain.kernels.copy_stream import CopyStream

ALIGNMENT: Final = 16
"""Alignment of tensors in a snapshot, in bytes: a device reads as much at once."""

ROOM_SHARE: Final = 64
"""Elements for each change that there is room for at first: 1.6 %."""

LARGEST_ROOM_SHARE: Final = 16
"""The same for room that has grown, after more elements changed than it had room for."""

SMALLEST_ROOM: Final = 1 << 20
"""Changes for which a lane has room whatever its size, unless it has fewer elements."""


class LaneKind(NamedTuple):
    """What the tensors of one lane have in common.

    Attributes:
        width: Size of an element's bits in the snapshot, in bytes.
        master: Whether the weights are fp32 masters of bf16 ones.
        resident: Whether the snapshot is on the device.
    """

    width: int
    master: bool
    resident: bool


class Compared(NamedTuple):
    """A tensor to compare with its bits in the snapshot.

    Attributes:
        name: Name of the tensor.
        kept: Flat bits of the snapshot in which its bits are, of any number of tensors.
        at: Position of its first element there.
        current: Flat weights on the device, in any dtype that casts to ``dtype``.
        dtype: Dtype of the snapshot's bits.
        resident: Whether the snapshot is on the device.
    """

    name: str
    kept: Tensor
    at: int
    current: Tensor
    dtype: torch.dtype
    resident: bool

    @property
    def kind(self) -> LaneKind:
        """The lane that this tensor takes."""
        master = self.current.dtype == torch.float32 and self.dtype == torch.bfloat16
        return LaneKind(self.kept.element_size(), master, self.resident)

    def bits(self, start: int, numel: int) -> Tensor:
        """Return bits of consecutive weights in the snapshot's dtype; not yet cast of masters."""
        weights = self.current[start : start + numel]
        return device.bits_of(weights if self.kind.master else weights.to(self.dtype))


class TensorSpan(NamedTuple):
    """A span of a tensor, with the tensor."""

    tensor: Compared
    span: Span

    @property
    def at(self) -> int:
        """Position of the first element in the snapshot's flat bits."""
        return self.tensor.at + self.span.start


class Run(NamedTuple):
    """Spans of a batch that lie side by side in the snapshot.

    Attributes:
        kept: Flat bits of the snapshot.
        start: Position of the first element there.
        stop: Position after the last element.
        spans: Number of spans.
    """

    kept: Tensor
    start: int
    stop: int
    spans: int


class Launched(NamedTuple):
    """A batch whose comparison is enqueued.

    Attributes:
        lane: Its lane.
        spans: Spans of tensors in the batch; their weights stay referenced.
        table: Its blocks.
        placed: Where its changes are.
    """

    lane: Lane
    spans: Sequence[TensorSpan]
    table: BlockTable
    placed: Placed


@dataclass(slots=True)
class _Slot:
    """Room on the device for the snapshot bits of a batch, and the event after its last use."""

    bits: Tensor
    free: torch.cuda.Event | None = None


@dataclass(slots=True)
class Lane:
    """Tensors of one kind on one device: collects batches and enqueues their comparison.

    Attributes:
        kind: What the tensors have in common.
        streams: Streams of the device.
        fused: Whether to use the kernels in Triton.
        numel: Number of elements that are expected.
        copies: Number of copies of snapshot bits to the device since the lane was made.
    """

    kind: LaneKind
    streams: CopyStream
    fused: bool
    numel: int = 0
    copies: int = 0
    _arena: Arena | None = None
    _header: Tensor | None = None
    _launched: list[Launched] = field(default_factory=list)
    _open: list[TensorSpan] = field(default_factory=list)
    _used: int = 0
    _slots: list[_Slot] = field(default_factory=list)
    _turn: int = 1

    @property
    def limit(self) -> int:
        """Largest number of blocks in a batch."""
        return batch_blocks(self.kind.width)

    def add(self, tensor: Compared) -> None:
        """Add a tensor; full batches are enqueued."""
        for span in spans_of(tensor.current.numel(), used=self._used, limit=self.limit):
            self._open.append(TensorSpan(tensor, span))
            self._used += span.blocks
            if self._used == self.limit:
                self.flush()

    def flush(self) -> None:
        """Enqueue the open batch, if there is one."""
        spans, self._open, self._used = self._open, [], 0
        if not spans:
            return
        if self.fused and self._arena is None:
            self._arena = self._room(self._capacity())
        batch = self._enqueue(spans, self._arena, self._header)
        self._launched.append(batch)
        self._header = batch.placed.header

    def redo(self, batch: Launched, nnz: int) -> Launched:
        """Enqueue a batch again that had no room for its ``nnz`` changes, with room of its own."""
        return self._enqueue(batch.spans, self._room(nnz), None)

    def drop(self) -> None:
        """Forget the open batch."""
        self._open, self._used = [], 0

    def take(self) -> list[Launched]:
        """Return the enqueued batches; the next ones use their room again."""
        launched, self._launched, self._header = self._launched, [], None
        return launched

    def fit(self, nnz: int) -> None:
        """Make more room for the next diff, if ``nnz`` changes had not enough."""
        if self._arena is None or nnz <= self._arena.offsets.numel():
            return
        grown = min(nnz * 5 // 4, self.numel // LARGEST_ROOM_SHARE)
        if grown > self._arena.offsets.numel():
            self._arena = None  # first gone, then made anew
            self._arena = self._room(grown)

    def _capacity(self) -> int:
        return min(self.numel, max(SMALLEST_ROOM, self.numel // ROOM_SHARE)) or SMALLEST_ROOM

    def _room(self, capacity: int) -> Arena:
        dtype, old = device.INT_DTYPES[self.kind.width], self.kind.resident
        return Arena.empty(capacity, dtype, self.streams.where, old=old)

    def _there(self, spans: Sequence[TensorSpan]) -> tuple[list[tuple[Tensor, int]], _Slot | None]:
        """Return where the snapshot bits of each span begin on the device, copied if need be."""
        if self.kind.resident:
            return [(one.tensor.kept, one.at) for one in spans], None
        found = list(runs(spans))
        slot = self._slot(sum(run.stop - run.start for run in found))
        with self.streams.copying():
            self.streams.copies_follow(slot.free)
            position, first = 0, 0
            there: list[tuple[Tensor, int]] = []
            for run in found:
                room = slot.bits[position : position + run.stop - run.start]
                self.streams.send_into(room, run.kept[run.start : run.stop])
                self.copies += 1
                shift = position - run.start
                there += [(slot.bits, one.at + shift) for one in spans[first : first + run.spans]]
                position, first = position + room.numel(), first + run.spans
            copied = self.streams.mark_copies()
        self.streams.computing_follows(copied)
        return there, slot

    def _slot(self, numel: int) -> _Slot:
        """Return one of two rooms for snapshot bits, in turn."""
        self._turn ^= 1
        if len(self._slots) <= self._turn:
            self._slots.append(self._new_slot(numel))
        slot = self._slots[self._turn]
        if slot.bits.numel() < numel:
            self.streams.keep_for_copies(slot.bits)
            slot = self._slots[self._turn] = self._new_slot(numel)
        return slot

    def _new_slot(self, numel: int) -> _Slot:
        expected = min(self.limit * BLOCK, self.numel)
        where, dtype = self.streams.where, device.INT_DTYPES[self.kind.width]
        bits = torch.empty(max(numel, expected), dtype=dtype, device=where)
        # Kernels that were enqueued before may still use this memory: copies must follow them.
        return _Slot(bits, self.streams.mark())

    def _enqueue(
        self, spans: Sequence[TensorSpan], arena: Arena | None, header: Tensor | None
    ) -> Launched:
        """Enqueue the comparison of a batch; without an arena in torch operations."""
        kind, streams = self.kind, self.streams
        table = block_table(np.array([one.span.numel for one in spans], np.int64))
        with streams.computing():
            then, slot = self._there(spans)
            if arena is None:
                now = [one.tensor.bits(*one.span) for one in spans]
                kept = [
                    bits[at : at + one.span.numel]
                    for (bits, at), one in zip(then, spans, strict=True)
                ]
                numels = streams.send(torch.from_numpy(table.numel))
                placed = diff_batch_(now, kept, numels, master=kind.master, resident=kind.resident)
            else:
                placed = self._fused(table, spans, then, arena, header)
            if slot is not None:
                slot.free = streams.mark()
        return Launched(self, spans, table, placed)

    def _fused(
        self,
        table: BlockTable,
        spans: Sequence[TensorSpan],
        then: Sequence[tuple[Tensor, int]],
        arena: Arena,
        header: Tensor | None,
    ) -> Placed:
        from deltachain.kernels import fused_diff  # noqa: PLC0415 - needs Triton

        if header is None:
            header = torch.zeros(3, dtype=torch.int64, device=self.streams.where)
        # By address: a view of each of many thousand tensors would cost more than to compare them.
        now, held = self._addresses(spans)
        kept = [bits.data_ptr() + at * self.kind.width for bits, at in then]
        width = 4 if self.kind.master else self.kind.width
        sides = [
            np.array(first, np.int64)[table.span] + table.first * size
            for first, size in ((now, width), (kept, self.kind.width))
        ]
        placed = fused_diff.diff_batch_(
            self.streams.send(torch.from_numpy(np.stack([*sides, table.numel]))),
            header,
            arena,
            master=self.kind.master,
            resident=self.kind.resident,
            aligned=not any((side % ALIGNMENT).any() for side in sides),
        )
        del held  # used until here: later memory of this stream may be the same
        return placed

    def _addresses(self, spans: Sequence[TensorSpan]) -> tuple[list[int], list[Tensor]]:
        """Return the address of the weights of each span, and tensors that were cast for them."""
        found, held = [], []
        for one in spans:
            current = one.tensor.current
            if self.kind.master or current.dtype == one.tensor.dtype:
                found.append(current.data_ptr() + one.span.start * current.element_size())
                continue
            held.append(one.tensor.bits(*one.span))
            found.append(held[-1].data_ptr())
        return found, held


def runs(spans: Sequence[TensorSpan]) -> Iterator[Run]:
    """Yield spans that lie side by side in the snapshot as one run, in order."""
    last: Run | None = None
    for one in spans:
        kept, stop = one.tensor.kept, one.at + one.span.numel
        # What lies between is padding, if it is less than the alignment of the next tensor.
        if (
            last is not None
            and last.kept is kept
            and 0 <= (one.at - last.stop) * kept.element_size() < ALIGNMENT
        ):
            last = Run(kept, last.start, stop, last.spans + 1)
            continue
        if last is not None:
            yield last
        last = Run(kept, one.at, stop, 1)
    if last is not None:
        yield last
