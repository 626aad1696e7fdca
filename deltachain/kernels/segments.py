"""Segments of many tensors in one buffer, as the batched decoders read them (FORMAT.md 4)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltachain.errors import MalformedError
from deltachain.types import StateDigest

if TYPE_CHECKING:
    from deltachain.format.keys import DigestKey


Table = npt.NDArray[np.int64]
Plane = npt.NDArray[np.uint8]

MAX_LENGTH: Final = 1 << 20  # upper bound of the elements of a segment (FORMAT.md 3)


def empty_bytes(nbytes: int) -> Plane:
    return np.empty(nbytes, np.uint8)


class Column(IntEnum):
    """Columns of :attr:`SegmentBatch.table`.

    ``FIRST``, ``GAP``, ``EXCEPTION`` and ``WIDE`` are positions in the arrays of the whole batch:
    counts are differences of consecutive rows, and the last row of the table has the totals.
    """

    TENSOR = 0
    """Number of the tensor, chosen by the caller."""
    START = 1
    """Flat index of the segment's first element."""
    LENGTH = 2
    """Number of elements that the segment covers."""
    FIRST = 3
    """Position of its first given element, in the output and in planes of values."""
    GAP = 4
    """Position of its first gap entry."""
    EXCEPTION = 5
    """Position of its first magnitude."""
    WIDE = 6
    """Position of its first wide step."""
    BIT = 7
    """Position of its first bit in ``sign`` and in ``exception``."""


class Reason(IntEnum):
    """Why a segment is malformed; of several reasons the largest is reported."""

    NONE = 0
    WIDE_STEP = 1
    WIDES = 2
    MAGNITUDE = 3
    EXCEPTIONS = 4
    LENGTH = 5
    LAST_GAP = 6
    GAPS = 7


MESSAGES: Final[dict[Reason, str]] = {
    Reason.WIDE_STEP: "a wide step is not canonical",
    Reason.WIDES: "the number of wide steps differs from the directory",
    Reason.MAGNITUDE: "a magnitude is not canonical",
    Reason.EXCEPTIONS: "the number of exceptions differs from the directory",
    Reason.LENGTH: "gaps leave the segment",
    Reason.LAST_GAP: "the last gap gives no element",
    Reason.GAPS: "gaps give another number of elements than the directory",
}


class StreamLayout(NamedTuple):
    """Which streams a batch has; the same for all of its tensors.

    Attributes:
        width: Bytes of an element: 1, 2, 4 or 8.
        gap: Bytes of a gap entry: 1 or 2.
        absolute: Whether ``planes`` has the new bits of every given element (``overwrite``);
            otherwise changes are steps, and it has the wide ones (``step``).
    """

    width: int
    gap: int
    absolute: bool


class BatchTotals(NamedTuple):
    nnz: int
    gaps: int
    exceptions: int
    wide: int


@dataclass(frozen=True, slots=True, eq=False)
class TensorStreams:
    """Inflated streams of consecutive segments of one tensor, or of several; values are untrusted.

    Attributes:
        tensor: Number of the tensor, or of that of each segment.
        numel: Elements of the tensor, or of that of each segment.
        segments: ``(n, 6)`` int64 rows of start, length, nnz, gaps, exceptions and wide.
        planes: Byte planes of the wide steps, or of the values: as many as an element has bytes.
        gaps: Byte planes of the gap entries: as many as an entry has bytes.
        sign: Packed sign bits; empty unless changes are steps.
        exception: Packed exception bits, laid out as ``sign``.
        magnitude: One byte for each exception.
        bit: Position of the first bit of the segments in ``sign`` and ``exception``, below 8.
    """

    tensor: int | Table
    numel: int | Table
    segments: Table
    planes: Sequence[Plane]
    gaps: Sequence[Plane]
    sign: Plane = field(default_factory=lambda: empty_bytes(0))
    exception: Plane = field(default_factory=lambda: empty_bytes(0))
    magnitude: Plane = field(default_factory=lambda: empty_bytes(0))
    bit: int = 0

    @property
    def nbytes(self) -> int:
        arrays = (*self.planes, *self.gaps, self.sign, self.exception, self.magnitude)
        return sum(array.nbytes for array in arrays)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentBatch:
    """Segments of many tensors: a table and all streams, in one buffer that is copied at once.

    Every number of the table lies within the tensors and the streams, so that only the *content* of
    streams remains untrusted.

    Attributes:
        layout: Streams of the batch.
        table: ``(segments + 1, 8)`` int64, see :class:`Column`; a view of the beginning of
            ``buffer``.
        buffer: Table, then gap planes, ``sign``, ``exception``, ``magnitude`` and value planes.
        offsets: Offset of each of these streams in ``buffer``, and the end of the last.
    """

    layout: StreamLayout
    table: Table
    buffer: Plane
    offsets: tuple[int, ...]

    @property
    def totals(self) -> BatchTotals:
        columns = (Column.FIRST, Column.GAP, Column.EXCEPTION, Column.WIDE)
        return BatchTotals(*(int(self.table[-1, column]) for column in columns))

    def spans(self) -> Table:
        """Return the given elements of each tensor: rows of tensor, first and count, and bound.

        The bound is greater than every index of the tensor in this batch.
        """
        table = self.table
        tensor = table[:-1, Column.TENSOR]
        begins = np.flatnonzero(np.diff(tensor, prepend=-1))
        first = table[begins, Column.FIRST]
        ends = np.append(first[1:], table[-1, Column.FIRST])
        bound = table[:-1, Column.START] + table[:-1, Column.LENGTH]
        bounds = np.maximum.reduceat(bound, begins) if begins.size else bound
        return np.stack([tensor[begins], first, ends - first, bounds], axis=1)

    def check(self, verdict: npt.NDArray[np.integer[Any]], names: Sequence[str]) -> None:
        """Raise the error of the first malformed segment, if any."""
        bad = np.flatnonzero(verdict)
        if bad.size:
            row = self.table[bad[0]]
            name, start = names[int(row[Column.TENSOR])], int(row[Column.START])
            why = MESSAGES[Reason(int(verdict[bad[0]]))]
            raise MalformedError(f"{name!r}, segment at {start}: {why}")


def pack(
    layout: StreamLayout,
    tensors: Sequence[TensorStreams],
    allocate: Callable[[int], Plane] = empty_bytes,
) -> SegmentBatch:
    """Copy the streams of many tensors into one buffer."""
    table = _table(layout, tensors)
    gap_planes = [[t.gaps[k] for t in tensors] for k in range(layout.gap)]
    bits = [] if layout.absolute else [[t.sign for t in tensors], [t.exception for t in tensors]]
    parts = [
        *gap_planes,
        *(bits or [[], []]),
        [] if layout.absolute else [t.magnitude for t in tensors],
        *([t.planes[k] for t in tensors] for k in range(layout.width)),
    ]
    sizes = [sum(map(len, part)) for part in parts]
    offsets = tuple(np.cumsum([table.nbytes, *sizes]).tolist())
    buffer = allocate(offsets[-1])
    buffer[: table.nbytes] = table.reshape(-1).view(np.uint8)
    for part, begin, end in zip(parts, offsets, offsets[1:], strict=False):
        if begin < end:
            np.concatenate(part, out=buffer[begin:end])
    view = buffer[: table.nbytes].view(np.int64).reshape(table.shape)
    return SegmentBatch(layout, view, buffer, offsets)


def _table(layout: StreamLayout, tensors: Sequence[TensorStreams]) -> Table:
    """Build the table, after a check of every number in it."""
    tensors_of = [len(t.segments) for t in tensors]
    segments = np.concatenate([np.empty((0, 6), np.int64), *(t.segments for t in tensors)])
    number = _of_segments([t.tensor for t in tensors], tensors_of)
    numel = _of_segments([t.numel for t in tensors], tensors_of)
    owner = np.repeat(np.arange(len(tensors)), tensors_of)
    start, length, nnz, gaps, exceptions, wide = segments.T
    fits = (start >= 0) & (length <= MAX_LENGTH) & (start <= numel - length)
    fits &= (nnz > 0) & (nnz <= length) & (wide >= 0) & (wide <= exceptions)
    fits &= exceptions <= (0 if layout.absolute else nnz)
    apart = (owner[1:] != owner[:-1]) | (number[1:] != number[:-1])
    fits[1:] &= (start[1:] >= start[:-1] + length[:-1]) | apart
    fits &= (nnz <= gaps) & (gaps <= nnz + length // ((1 << 8 * layout.gap) - 1))
    ends = np.cumsum([0, *tensors_of])
    sums = np.concatenate([np.zeros((1, 6), np.int64), np.cumsum(segments, axis=0)])
    totals = sums[ends[1:]] - sums[ends[:-1]]
    bits = np.array([[t.bit, t.sign.size, t.exception.size] for t in tensors]).reshape(-1, 3)
    enough = _enough(layout, tensors, totals, bits)
    if not fits.all() or not enough.all():
        raise MalformedError("segments contradict the tensors or the lengths of streams")
    table = np.zeros((len(segments) + 1, len(Column)), np.int64)
    table[:-1, Column.TENSOR] = number
    table[:-1, Column.START] = start
    table[:-1, Column.LENGTH] = length
    table[:, Column.FIRST : Column.WIDE + 1] = sums[:, 2:]
    byte = np.cumsum(bits[:, 1]) - bits[:, 1]
    before = sums[:-1, 2] - sums[ends[:-1], 2][owner]
    table[:-1, Column.BIT] = 8 * byte[owner] + bits[owner, 0] + before
    return table


def _of_segments(of: "Sequence[int | Table]", counts: Sequence[int]) -> Table:
    """Return what is given of tensors, or of each of their segments, for all segments."""
    pairs = zip(of, counts, strict=True)
    return np.concatenate([np.empty(0, np.int64), *(np.broadcast_to(*one) for one in pairs)])


def _enough(
    layout: StreamLayout, tensors: Sequence[TensorStreams], totals: Table, bits: Table
) -> npt.NDArray[np.bool_]:
    """Return for each tensor whether its streams have the lengths that its segments need."""
    _, _, nnz, gaps, exceptions, wide = totals.T
    values = nnz if layout.absolute else wide
    found = [
        (
            len(t.gaps) == layout.gap and all(plane.size == want for plane in t.gaps),
            len(t.planes) == layout.width and all(plane.size == n for plane in t.planes),
            layout.absolute or t.magnitude.size == count,
        )
        for t, want, n, count in zip(tensors, gaps, values, exceptions, strict=True)
    ]
    enough: npt.NDArray[np.bool_] = np.all(np.array(found, np.bool_).reshape(-1, 3), axis=1)
    if not layout.absolute:
        need = (bits[:, 0] + nnz + 7) // 8
        enough &= (bits[:, 0] >= 0) & (bits[:, 0] < 8)
        enough &= (bits[:, 1] == need) & (bits[:, 2] == need)
    return enough


MAX_DIMS: Final = 8
"""Upper bound of the dimensions of a placement, after contiguous ones are merged."""


class Field(IntEnum):
    """Columns of :attr:`PlacementTable.rows`.

    Size, stride in the tensor and stride in the storage of each dimension follow.
    """

    OFFSET = 0
    AT = 1
    SLOT = 2
    KEY0 = 3
    KEY1 = 4
    ADDRESS = 5
    DIMS = 6


@dataclass(frozen=True, slots=True, eq=False)
class LivePlacement:
    """A strided window of a checkpoint tensor, and the live bits that hold its elements.

    Attributes:
        tensor: Number of the tensor.
        offset: Flat index of the first element in the tensor.
        dims: Size, stride in the flat tensor and stride in ``storage`` of each dimension, in
            descending order of the strides in the tensor; at most 8. Empty for a single element.
        storage: ``(n,)`` flat bits that contain the elements, as a signed integer tensor of the
            element's width (uint8 for one byte).
        at: Position of the first element in ``storage``.
        slot: Number under which effects on the state digest are summed.
    """

    tensor: int
    offset: int
    dims: Sequence[tuple[int, int, int]]
    storage: Tensor
    at: int = 0
    slot: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PlacementTable:
    """Placements of many tensors on one device; built once, used by every stage.

    Attributes:
        rows: ``(placements, columns)`` int64 on the device, see :class:`Field`; in the order of
            ``storages``.
        first: ``(tensors + 1,)`` int64: the number of the first placement of each tensor.
        storages: Live bits of each placement.
        widths: ``(placements,)`` bytes of an element.
        slots: Number of slots.
        ndim: Dimensions of each row; those that a placement lacks have one element.
    """

    rows: Tensor
    first: Table
    storages: tuple[Tensor, ...]
    widths: Table
    slots: int
    ndim: int

    @classmethod
    def build(
        cls, placements: Sequence[LivePlacement], keys: "Sequence[DigestKey]", device: torch.device
    ) -> "PlacementTable":
        """Build the table on a device, with or without an index."""
        device = torch.empty(0, device=device).device  # as tensors there say it
        ordered = sorted(placements, key=lambda placement: placement.tensor)
        ndim = max((len(placement.dims) for placement in ordered), default=0)
        for placement in ordered:
            _check_placement(placement, device)
        rows = [_row(placement, keys[placement.tensor], ndim) for placement in ordered]
        table = np.array(rows, np.uint64).view(np.int64).reshape(len(rows), Field.DIMS + 3 * ndim)
        owners = np.array([placement.tensor for placement in ordered], np.int64)
        return cls(
            rows=torch.from_numpy(table).to(device),
            first=np.searchsorted(owners, np.arange(len(keys) + 1)),
            storages=tuple(placement.storage for placement in ordered),
            widths=np.array([placement.storage.itemsize for placement in ordered], np.int64),
            slots=1 + max((placement.slot for placement in ordered), default=-1),
            ndim=ndim,
        )

    def visits(self, spans: Table, bits: torch.dtype) -> Table:
        """Pair changes and placements of a tensor: rows of placement, first change and count.

        Args:
            spans: Rows of :meth:`.segments.SegmentBatch.spans`.
        """
        tensor = spans[:, 0]
        placements = self.first[tensor + 1] - self.first[tensor]
        span = np.repeat(np.arange(len(spans)), placements)
        nth = np.arange(span.size) - np.repeat(np.cumsum(placements) - placements, placements)
        number = self.first[tensor[span]] + nth
        if bool(np.any(self.widths[number] != bits.itemsize)):
            raise ValueError(f"changes of {bits} for placements of another width")
        return np.stack([number, spans[span, 1], spans[span, 2]], axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class ChangeBatch:
    """Decoded changes of many tensors on one device; the verdict is not read yet.

    Indices lie within their tensors whatever the verdict, so that kernels may use them.

    Attributes:
        indices: ``(n,)`` int64 flat indices into the tensors.
        values: ``(n,)`` new bits or wrapping steps.
        absolute: Whether a value is the new bits rather than a step; one for all, or ``(n,)`` bool.
        kept: ``(n,)`` bool, false for entries without a change; ``None`` if there are none.
        spans: Rows of tensor, first change, count and bound of the indices.
        verdicts: Batches that the changes come from, each with an ``(segments,)`` int32 tensor of
            :class:`.segments.Reason`.
    """

    indices: Tensor
    values: Tensor
    absolute: bool | Tensor
    kept: Tensor | None
    spans: Table
    verdicts: tuple[tuple[SegmentBatch, Tensor], ...]

    def check(self, verdicts: Table, names: Sequence[str]) -> None:
        """Raise the error of the first malformed segment, if any; see :meth:`SegmentBatch.check`.

        ``verdicts`` has those of all batches end to end, on the host.
        """
        at = 0
        for batch, verdict in self.verdicts:
            batch.check(verdicts[at : at + verdict.numel()], names)
            at += verdict.numel()


@dataclass(frozen=True, slots=True)
class SlotEffect:
    """Effect of ``nnz`` staged changes on the state digest, in one slot."""

    added: StateDigest
    removed: StateDigest
    nnz: int


@dataclass(frozen=True, slots=True, eq=False)
class StagedChanges:
    """Changes that are ready to write: positions in live storages, old and new bits.

    Attributes:
        positions: ``(n,)`` int64 positions in the storages, grouped by block.
        old: ``(n,)`` old bits.
        new: ``(n,)`` new bits.
        sums: ``(slots, 5)`` int64 on the device: lanes of the new and of the old bits, and the
            number of elements.
        blocks: ``(blocks, 3)`` int64 on the device: address, first position and count of each block
            of a write.
        placements: Table of the placements.
    """

    positions: Tensor
    old: Tensor
    new: Tensor
    sums: Tensor
    blocks: Tensor
    placements: PlacementTable

    @property
    def nbytes(self) -> int:
        return sum(
            one.nbytes for one in (self.positions, self.old, self.new, self.sums, self.blocks)
        )


def effects(sums: "Tensor | npt.NDArray[Any]") -> list[SlotEffect]:
    """Read the effects of each slot from :attr:`StagedChanges.sums`, or from a sum of them."""
    table = sums if isinstance(sums, np.ndarray) else sums.cpu().numpy()
    rows = table.view(np.uint64).tolist()
    return [SlotEffect(StateDigest(a, b), StateDigest(c, d), n) for a, b, c, d, n in rows]


def _check_placement(one: LivePlacement, device: torch.device) -> None:
    low, high = one.at, one.at + sum((size - 1) * live for size, _, live in one.dims)
    inside = 0 <= low <= high < one.storage.numel() and one.offset >= 0
    strides = [there for _, there, _ in one.dims]
    ordered = strides == sorted(strides, reverse=True)
    positive = all(size > 0 and there > 0 and live >= 0 for size, there, live in one.dims)
    if not inside or not ordered or not positive or len(one.dims) > MAX_DIMS:
        raise ValueError(f"placement {one.dims} at {one.at} is outside its storage")
    if one.storage.device != device:
        raise ValueError(f"placement on {one.storage.device}, table on {device}")


def _row(one: LivePlacement, key: "DigestKey", ndim: int) -> list[int]:
    filled = [*one.dims, *[(1, 1, 0)] * (ndim - len(one.dims))]
    address = one.storage.data_ptr()
    return [one.offset, one.at, one.slot, *key, address, *(n for dim in filled for n in dim)]
