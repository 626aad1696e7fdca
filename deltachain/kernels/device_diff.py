"""Diff of weights on a device against a snapshot on the host or on that device.

Tensors are compared in batches of blocks. A *block* is the unit of comparison: up to ``BLOCK``
consecutive elements of one tensor. A *batch* is a bounded number of blocks of any tensors, compared
by the same launches, so that their number follows from the size of a model and not from its number
of tensors. A snapshot on the host is copied to the device a batch at a time on a stream of its own,
each while earlier batches are compared; tensors that lie side by side in the snapshot cross in one
copy. Changes are compacted on the device. The stream of the caller is waited for once, when all
batches are enqueued. Then exactly the changes are copied back: two bytes for the offset of each in
its block and its new bits, and its old bits too if the snapshot is not on the host. From then on
the weights may change: :class:`Landing` divides the changes among tensors, and writes them into a
snapshot on the host, in any thread.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from itertools import product
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltachain.kernels import host
from deltachain.kernels.arrays import Changes
from deltachain.kernels.torch_kernels import INT_DTYPES, bits_of
from deltachain.threads import Pool, cores
from deltachain.types import BITS_DTYPES, Bits, Indices

logger = logging.getLogger(__name__)

BLOCK: Final = 4096
"""Elements of a block. An offset in a block takes two bytes, and its count another two."""

BATCH_NBYTES: Final = 128 << 20
"""Largest size of a batch's snapshot bits, in bytes, of which two are on the device at a time.

A batch costs some 0.1 ms of Python, and its copy a few milliseconds.
"""

RESIDENT_BATCH: Final = 8  # times as large are batches that need no room for the snapshot


class BlockTable(NamedTuple):
    """Blocks of a batch, in order; three ``(blocks,)`` int64 arrays."""

    span: Indices
    first: Indices
    numel: Indices


def block_table(numels: npt.NDArray[np.int64]) -> BlockTable:
    """Return the blocks of spans with the given ``(spans,)`` numbers of elements."""
    blocks = -(-numels // BLOCK)
    span = np.repeat(np.arange(numels.size), blocks)
    number = np.arange(span.size) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    first = number * BLOCK
    return BlockTable(span, first, np.minimum(BLOCK, numels[span] - first))


class CopyStream:
    """The caller's stream on a device, which computes, and one that copies.

    Attributes:
        to_device_nbytes: Bytes copied to the device so far.
        to_host_nbytes: Bytes copied to the host so far.
    """

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self.to_device_nbytes = self.to_host_nbytes = 0
        self._copies = torch.cuda.Stream(where) if where.type == "cuda" else None

    def computing(self) -> AbstractContextManager[Any]:
        """Make the device current, so that kernels are launched on the caller's stream there."""
        return nullcontext() if self._copies is None else torch.cuda.device(self.where)

    def copying(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._copies is None else torch.cuda.stream(self._copies)

    def copies_follow(self, event: torch.cuda.Event | None) -> None:
        if self._copies is not None and event is not None:
            self._copies.wait_event(event)

    def computing_follows(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self.where).wait_event(event)

    def mark(self) -> torch.cuda.Event | None:
        if self._copies is None:
            return None
        event: torch.cuda.Event = torch.cuda.current_stream(self.where).record_event()
        return event

    def mark_copies(self) -> torch.cuda.Event | None:
        return None if self._copies is None else self._copies.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Block this thread until an event; nothing else of a diff does."""
        if event is not None:
            event.synchronize()

    def keep_for_copies(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor that goes away until the copies that use it are done."""
        if self._copies is not None:
            tensor.record_stream(self._copies)

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return room for ``numel`` elements on the host, pinned for copies from the device."""
        return torch.empty(numel, dtype=dtype, pin_memory=self._copies is not None)

    def send(self, array: Tensor) -> Tensor:
        """Enqueue the copy of a small tensor on the host to the device, without waiting."""
        self.to_device_nbytes += array.nbytes
        if self._copies is None:
            return array
        # The allocator of pinned memory gives it out again when the copy is done.
        return array.pin_memory().to(self.where, non_blocking=True)

    def send_into(self, room: Tensor, bits: Tensor) -> None:
        """Enqueue the copy of pinned bits on the host into room on the device, without waiting."""
        self.to_device_nbytes += bits.nbytes
        room.copy_(bits, non_blocking=True)

    def receive(self, tensor: Tensor) -> Tensor:
        """Enqueue the copy of a tensor to pinned memory; it is there after the next wait."""
        self.to_host_nbytes += tensor.nbytes
        if self._copies is None:
            return tensor.clone()
        room = self.room(tensor.numel(), tensor.dtype).view(tensor.shape)
        return room.copy_(tensor, non_blocking=True)


class Arena(NamedTuple):
    """Room on a device for the changes of batches, filled from the front."""

    offsets: Tensor  # offset of each change in its block, int16 of shape `(capacity,)`
    new: Tensor  # new bits, shape `(capacity,)`
    old: Tensor  # old bits, shape `(capacity,)`; `new` itself if they are not wanted

    @classmethod
    def empty(cls, capacity: int, dtype: torch.dtype, where: torch.device, *, old: bool) -> "Arena":
        offsets = torch.empty(capacity, dtype=torch.int16, device=where)
        new = torch.empty(capacity, dtype=dtype, device=where)
        return cls(offsets, new, torch.empty_like(new) if old else new)

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """Offsets, new bits, and old bits if they are wanted."""
        return (self.offsets, self.new) if self.old is self.new else tuple(self)


class Placed(NamedTuple):
    """Where the changes of a batch are, on its device.

    Attributes:
        counts: Number of changes of each block, int16 of shape ``(blocks,)``.
        header: First change in the arena, or -1 if it had no room; number of changes; end of all
            changes in the arena; int64 of shape ``(3,)``.
    """

    counts: Tensor
    header: Tensor
    arena: Arena


ALIGNMENT: Final = 16
"""Alignment of tensors in a snapshot, in bytes: a device reads as much at once."""

ROOM_SHARE: Final = 64  # elements for each change that there is room for at first: 1.6 %
LARGEST_ROOM_SHARE: Final = 16
"""The same for room that has grown, after more elements changed than it had room for."""

SMALLEST_ROOM: Final = 1 << 20
"""Changes for which a lane has room whatever its size, unless it has fewer elements."""


class LaneKind(NamedTuple):
    """What the tensors of one lane have in common."""

    width: int  # size of an element's bits in the snapshot, in bytes
    master: bool  # whether the weights are fp32 masters of bf16 ones
    resident: bool  # whether the snapshot is on the device

    @classmethod
    @cache
    def of(cls, current: torch.dtype, wire: torch.dtype, *, resident: bool) -> "LaneKind":
        master = current == torch.float32 and wire == torch.bfloat16
        return cls(wire.itemsize, master, resident)


class Compared(NamedTuple):
    """A tensor to compare with its bits in the snapshot."""

    name: str
    kept: Tensor
    at: int
    current: Tensor  # contiguous
    dtype: torch.dtype
    resident: bool

    @property
    def kind(self) -> LaneKind:
        return LaneKind.of(self.current.dtype, self.dtype, resident=self.resident)

    def bits(self, start: int, numel: int) -> Tensor:
        """Return bits of consecutive weights, cast to the snapshot's dtype by torch."""
        flat = self.current.detach().view(-1)
        return bits_of(flat[start : start + numel].to(self.dtype))


class TensorSpan(NamedTuple):
    """Consecutive elements of one tensor in one batch; ``start`` is a multiple of ``BLOCK``."""

    tensor: Compared
    start: int
    numel: int

    @property
    def at(self) -> int:
        """Position of the first element in the snapshot's flat bits."""
        return self.tensor.at + self.start


class Run(NamedTuple):
    """Spans of a batch that lie side by side in ``kept``, the flat bits of the snapshot."""

    kept: Tensor
    start: int
    stop: int
    spans: int


class BatchTable(NamedTuple):
    """Blocks of a batch by address, on the device too: the same in each diff of the same memory."""

    key: tuple[tuple[int, ...], ...]  # addresses of weights and snapshot, and sizes, of each span
    blocks: BlockTable
    sent: Tensor  # int64 of shape `(3, blocks)`
    aligned: bool  # whether every address is a multiple of `ALIGNMENT`


class Launched(NamedTuple):
    """A batch whose comparison is enqueued; the weights of its spans stay referenced."""

    lane: "Lane"
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
    """Tensors of one kind on one device: collects batches and enqueues their comparison."""

    kind: LaneKind
    streams: CopyStream
    numel: int = 0
    copies: int = 0
    _arena: Arena | None = None
    _header: Tensor | None = None
    _launched: list[Launched] = field(default_factory=list)
    _open: list[TensorSpan] = field(default_factory=list)
    _used: int = 0
    _slots: list[_Slot] = field(default_factory=list)
    _tables: dict[int, BatchTable] = field(default_factory=dict)  # by number of the batch
    limit: int = field(init=False)  # blocks of a batch

    def __post_init__(self) -> None:
        nbytes = BATCH_NBYTES * (RESIDENT_BATCH if self.kind.resident else 1)
        self.limit = max(1, nbytes // (self.kind.width * BLOCK))

    def add(self, tensor: Compared) -> None:
        """Add a tensor, cut where a batch is full; full batches are enqueued."""
        start, numel = 0, tensor.current.numel()
        while start < numel:
            span = TensorSpan(tensor, start, min(numel - start, (self.limit - self._used) * BLOCK))
            self._open.append(span)
            self._used += -(-span.numel // BLOCK)
            start += span.numel
            if self._used == self.limit:
                self.flush()

    def flush(self) -> None:
        spans, self._open, self._used = self._open, [], 0
        if not spans:
            return
        if self._arena is None:
            share = max(SMALLEST_ROOM, self.numel // ROOM_SHARE)
            self._arena = self._room(min(self.numel, share) or SMALLEST_ROOM)
        batch = self._enqueue(spans, self._arena, self._header)
        self._launched.append(batch)
        self._header = batch.placed.header

    def redo(self, batch: Launched, nnz: int) -> Launched:
        """Enqueue a batch again that had no room for its ``nnz`` changes, with room of its own."""
        return self._enqueue(batch.spans, self._room(nnz), None)

    def drop(self) -> None:
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

    def _room(self, capacity: int) -> Arena:
        dtype, old = INT_DTYPES[self.kind.width], self.kind.resident
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
        turn = len(self._launched) % 2
        while len(self._slots) <= turn:
            self._slots.append(self._new_slot(numel))
        slot = self._slots[turn]
        if slot.bits.numel() < numel:
            self.streams.keep_for_copies(slot.bits)
            slot = self._slots[turn] = self._new_slot(numel)
        return slot

    def _new_slot(self, numel: int) -> _Slot:
        expected = min(self.limit * BLOCK, self.numel)
        where, dtype = self.streams.where, INT_DTYPES[self.kind.width]
        bits = torch.empty(max(numel, expected), dtype=dtype, device=where)
        # Kernels that were enqueued before may still use this memory: copies must follow them.
        return _Slot(bits, self.streams.mark())

    def _enqueue(
        self, spans: Sequence[TensorSpan], arena: Arena, header: Tensor | None
    ) -> Launched:
        from deltachain.kernels import fused_diff  # noqa: PLC0415 - needs Triton

        streams = self.streams
        with streams.computing():
            then, slot = self._there(spans)
            if header is None:
                header = torch.zeros(3, dtype=torch.int64, device=streams.where)
            now, held = self._addresses(spans)
            table = self._table(spans, now, then, keep=not held)
            placed = fused_diff.diff_batch_(
                table.sent,
                header,
                arena,
                master=self.kind.master,
                resident=self.kind.resident,
                aligned=table.aligned,
            )
            del held  # used until here: later memory of this stream may be the same
            if slot is not None:
                slot.free = streams.mark()
        return Launched(self, spans, table.blocks, placed)

    def _table(
        self,
        spans: Sequence[TensorSpan],
        now: Sequence[int],
        then: Sequence[tuple[Tensor, int]],
        *,
        keep: bool,
    ) -> BatchTable:
        """Return the blocks of a batch; reuse the last diff's table if the memory is the same."""
        # By address: a view of each of many thousand tensors would cost more than to compare them.
        kept = [bits.data_ptr() + at * self.kind.width for bits, at in then]
        numels = [one.numel for one in spans]
        key = tuple(now), tuple(kept), tuple(numels)
        known = self._tables.get(len(self._launched))
        if known is not None and known.key == key:
            return known
        table = block_table(np.array(numels, np.int64))
        width = 4 if self.kind.master else self.kind.width
        sides = [
            np.array(first, np.int64)[table.span] + table.first * size
            for first, size in ((now, width), (kept, self.kind.width))
        ]
        sent = self.streams.send(torch.from_numpy(np.stack([*sides, table.numel])))
        made = BatchTable(key, table, sent, not any((side % ALIGNMENT).any() for side in sides))
        if keep:
            self._tables[len(self._launched)] = made
        return made

    def _addresses(self, spans: Sequence[TensorSpan]) -> tuple[list[int], list[Tensor]]:
        """Return the address of the weights of each span, and tensors that were cast for them."""
        found, held = [], []
        for one in spans:
            current = one.tensor.current
            if self.kind.master or current.dtype == one.tensor.dtype:
                found.append(current.data_ptr() + one.start * current.element_size())
                continue
            held.append(one.tensor.bits(one.start, one.numel))
            found.append(held[-1].data_ptr())
        return found, held


def runs(spans: Sequence[TensorSpan]) -> Iterator[Run]:
    """Yield spans that lie side by side in the snapshot as one run, in order."""
    last: Run | None = None
    for one in spans:
        kept, stop = one.tensor.kept, one.at + one.numel
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


class ChangeColumns(NamedTuple):
    """Changes of an arena on the host, in the order of its batches; each of shape ``(nnz,)``."""

    offsets: npt.NDArray[np.int16]
    new: Bits
    old: Bits  # of a snapshot on the host: room for them
    indices: Indices  # room for them

    @classmethod
    def of(cls, offsets: Tensor, new: Tensor, old: Tensor | None = None) -> "ChangeColumns":
        bits = new.numpy().view(BITS_DTYPES[new.element_size()])
        before = np.empty_like(bits) if old is None else old.numpy().view(bits.dtype)
        return cls(offsets.numpy(), bits, before, np.empty(bits.size, np.int64))


@dataclass(frozen=True, slots=True)
class Landed:
    """A batch that was compared, and its changes on the host."""

    batch: Launched
    nnz: int
    start: int  # first of its changes in the columns; negative if there was no room for them
    counts: npt.NDArray[np.int16]  # number of changes of each block, shape `(blocks,)`
    columns: ChangeColumns
    done: Indices = field(default_factory=lambda: np.zeros(1, np.int64))
    """Number of runs already written to a snapshot on the host: an interrupted call can resume."""

    def fill(self) -> None:
        """Find the indices of the changes; write them into a snapshot on the host."""
        table, spans, kind = self.batch.table, self.batch.spans, self.batch.lane.kind
        mine = slice(self.start, self.start + self.nnz)
        offsets, new, old, indices = (column[mine] for column in self.columns)
        first = table.first + np.array([one.start for one in spans], np.int64)[table.span]
        host.expand_blocks(first, self.counts, offsets, indices)
        if kind.resident:
            return
        places = table.first + np.array([one.at for one in spans], np.int64)[table.span]
        before = np.concatenate(([0], np.cumsum(self.counts, dtype=np.int64)))
        number = 0
        for turn, run in enumerate(runs(spans)):
            low, high = np.searchsorted(table.span, (number, number + run.spans)).tolist()
            number += run.spans
            some = slice(before[low], before[high])
            if turn >= self.done[0]:
                host.exchange_blocks_(
                    run.kept.numpy().view(new.dtype),
                    (places[low:high], self.counts[low:high]),
                    offsets[some], new[some], old[some], self.done,
                )  # fmt: skip

    def pieces(self) -> Iterator[tuple[str, int, int]]:
        """Yield the name of each changed tensor, its first change in the columns and their end."""
        table, spans = self.batch.table, self.batch.spans
        edges = np.searchsorted(table.span, np.arange(len(spans) + 1))
        before = np.concatenate(([0], np.cumsum(self.counts, dtype=np.int64)))[edges] + self.start
        for one, low, high in zip(spans, before[:-1].tolist(), before[1:].tolist(), strict=True):
            if low < high:
                yield one.tensor.name, low, high


class Landing:
    """Changes of a diff on the host, not yet by tensor; ``nnz`` is their number."""

    def __init__(self, landed: Sequence[Landed]) -> None:
        self._landed = [one for one in landed if one.nnz]
        self.nnz = sum(one.nnz for one in landed)

    def complete(self, found: MutableMapping[str, Changes]) -> None:
        """Give ``found`` the changes of each tensor, and write them into a snapshot on the host.

        In any thread, on all cores; until then a snapshot on the host is as it was before.
        """
        landed = self._landed
        with Pool(cores()) as pool:
            for _ in pool.ordered(
                Landed.fill, landed, ahead=4 * cores(), small=lambda one: one.nnz < SMALL_NNZ
            ):
                pass
        pieces: dict[str, list[tuple[ChangeColumns, slice]]] = defaultdict(list)
        for one in landed:
            for name, start, stop in one.pieces():
                columns, last = pieces[name][-1] if pieces[name] else (None, slice(0))
                if columns is one.columns and last.stop == start:
                    pieces[name][-1] = columns, slice(last.start, stop)
                else:
                    pieces[name].append((one.columns, slice(start, stop)))
        for name, several in pieces.items():
            found[name] = _joined(
                [Changes(c.indices[at], c.old[at], c.new[at]) for c, at in several]
            )


SMALL_NNZ: Final = 1 << 14  # changes below which no thread is worth its start


def _joined(several: Sequence[Changes]) -> Changes:
    """Join changes of one tensor, of which batches without room have their own columns."""
    if len(several) == 1:
        return several[0]
    ordered = sorted(several, key=lambda changes: int(changes.indices[0]))
    return Changes(*(np.concatenate(column) for column in zip(*ordered, strict=True)))


class DeviceDiff:
    """Diffs of weights on one device; its buffers are kept from one diff to the next.

    Call ``add`` for every tensor, then ``land``; use from one thread and one stream at a time.
    """

    def __init__(self, where: torch.device) -> None:
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

    def land(self) -> Landing:
        """Wait for the changes of all tensors since the last call; then these may change."""
        for lane in self.lanes.values():
            lane.flush()
        landed = self._land([batch for lane in self.lanes.values() for batch in lane.take()])
        for number, one in enumerate(landed):
            if one.start < 0:  # seldom, and large: one at a time
                (landed[number],) = self._land([one.batch.lane.redo(one.batch, one.nnz)])
        for lane in self.lanes.values():
            lane.fit(sum(one.nnz for one in landed if one.batch.lane is lane))
        return Landing(landed)

    def settle(self, found: MutableMapping[str, Changes]) -> None:
        """Wait for the changes of all tensors since the last call, and update the snapshot."""
        self.land().complete(found)

    def _lane(self, kind: LaneKind) -> Lane:
        if kind not in self.lanes:
            self.lanes[kind] = Lane(kind, self.streams)
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
                key: [streams.receive(column[: used[key]]) for column in arena.columns]
                for key, arena in arenas.items()
            }
            copied = streams.mark_copies()
        streams.wait(copied)
        columns = {key: ChangeColumns.of(*some) for key, some in arrived.items()}
        ends = np.cumsum([batch.table.numel.size for batch in launched]).tolist()
        landed = []
        for batch, end, (start, nnz, _) in zip(launched, ends, headers.tolist(), strict=True):
            blocks = counts[end - batch.table.numel.size : end]
            landed.append(Landed(batch, nnz, start, blocks, columns[id(batch.placed.arena)]))
        return landed


@cache
def compares_on(where: torch.device, current: torch.dtype, wire: torch.dtype) -> bool:
    """Return whether weights on a device are compared there, tried once in a process.

    The kernels of each kind of weights are compiled and tried on their first use. They need Triton
    and a C compiler, which a machine may lack. Other weights are copied to the host and compared
    there.
    """
    if where.type != "cuda" or find_spec("triton") is None:
        return False
    return _agrees(where, LaneKind.of(current, wire, resident=False))


@cache
def _agrees(where: torch.device, kind: LaneKind) -> bool:
    try:
        wrong = disagreements(where, [kind])
    except Exception as exc:  # noqa: BLE001 - compilers and drivers raise errors of any kind
        logger.warning("weights on %s are compared on the host: %s", where, exc)
        return False
    if wrong:
        logger.warning("weights on %s are compared on the host: kernels fail %s", where, wrong)
    return not wrong


KINDS: Final = (
    *(LaneKind(width, master=False, resident=False) for width in INT_DTYPES),
    LaneKind(2, master=True, resident=False),
)


def disagreements(where: torch.device, kinds: Iterable[LaneKind] = KINDS) -> list[str]:
    """Return the kinds of tensors for which device kernels and host kernels disagree.

    Each is tried with a snapshot on the host and with one on the device.
    """
    wrong = []
    for kind, resident in product(kinds, (False, True)):
        name, current, wire, expected = _trial(where, kind)
        snapshot = torch.zeros(expected.size, dtype=INT_DTYPES[kind.width])
        kept = snapshot.to(where) if resident else snapshot
        diff, found = DeviceDiff(where), dict[str, Changes]()
        diff.add(Compared("w", kept, 0, current, wire, resident))
        diff.settle(found)
        changes = host.diff_(np.zeros(expected.size, expected.dtype), expected)
        equal = "w" in found and all(map(np.array_equal, found["w"], changes))
        if not (equal and np.array_equal(kept.cpu().numpy().view(expected.dtype), expected)):
            wrong.append(f"{name}, snapshot on the {'device' if resident else 'host'}")
    return wrong


def _trial(where: torch.device, kind: LaneKind) -> tuple[str, Tensor, torch.dtype, Bits]:
    """Return the name of a kind, such weights on a device, their wire dtype and their bits."""
    rng, numel = np.random.default_rng(1), BLOCK + 3
    if kind.master:
        values = rng.standard_normal(numel, np.float32)
        weights = torch.from_numpy(values).to(where)
        return "fp32", weights, torch.bfloat16, host.cast_bf16(values)
    width, dtype = kind.width, INT_DTYPES[kind.width]
    bits: Bits = rng.integers(0, 256, numel * width, np.uint8).view(BITS_DTYPES[width])
    signed = bits.view(f"<i{width}") if width > 1 else bits
    return str(dtype), torch.from_numpy(signed).to(where), dtype, bits
