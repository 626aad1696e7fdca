"""Placements of many tensors in live memory, and the changes that are staged for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltachain.kernels.segments import Table
from deltachain.types import StateDigest

if TYPE_CHECKING:
    from deltachain.format.digest import DigestKey

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
        cls, placements: Sequence[LivePlacement], keys: Sequence[DigestKey], device: torch.device
    ) -> PlacementTable:
        """Build the table.

        Args:
            placements: In any order; the order of the placements of one tensor is kept.
            keys: Digest keys of the tensors, by number.
            device: Device of all storages.

        Raises:
            ValueError: A placement is outside its storage or on another device, or has too many
                dimensions.
        """
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
            bits: Dtype of the changes.

        Raises:
            ValueError: A placement has bits of another dtype.
        """
        tensor = spans[:, 0]
        placements = self.first[tensor + 1] - self.first[tensor]
        span = np.repeat(np.arange(len(spans)), placements)
        nth = np.arange(span.size) - np.repeat(np.cumsum(placements) - placements, placements)
        number = self.first[tensor[span]] + nth
        if bool(np.any(self.widths[number] != bits.itemsize)):
            raise ValueError(f"changes of {bits} for placements of another width")
        return np.stack([number, spans[span, 1], spans[span, 2]], axis=1)


class Checked(Protocol):
    """Segments whose decoding may have failed."""

    def check(self, verdict: npt.NDArray[np.integer[Any]], names: Sequence[str]) -> None:
        """Raise the error of the first segment with a reason, if any; see :class:`ChangeBatch`."""


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
            :class:`.segments.Reason` or :class:`.tile_batch.TileReason`.
    """

    indices: Tensor
    values: Tensor
    absolute: bool | Tensor
    kept: Tensor | None
    spans: Table
    verdicts: tuple[tuple[Checked, Tensor], ...]

    def check(self, verdicts: Table, names: Sequence[str]) -> None:
        """Raise the error of the first malformed segment, if any.

        Args:
            verdicts: All verdicts end to end, on the host.
            names: Names of the tensors, by number.

        Raises:
            MalformedError: A segment is malformed.
            BaseMismatchError: Tiles cannot be decoded with the old bits.
        """
        at = 0
        for batch, verdict in self.verdicts:
            batch.check(verdicts[at : at + verdict.numel()], names)
            at += verdict.numel()


@dataclass(frozen=True, slots=True)
class SlotEffect:
    """Effect of staged changes on the state digest, in one slot.

    Attributes:
        added: State digest of the new bits.
        removed: State digest of the old bits.
        nnz: Number of elements.
    """

    added: StateDigest
    removed: StateDigest
    nnz: int


@dataclass(frozen=True, slots=True, eq=False)
class StagedChanges:
    """Changes that are ready to write: positions in live storages, old and new bits.

    Attributes:
        positions: ``(n,)`` int64 positions in the storages, grouped by run.
        old: ``(n,)`` old bits.
        new: ``(n,)`` new bits.
        runs: ``(runs, 3)`` int64 on the host: placement, first position and end of each run.
        sums: ``(slots, 5)`` int64 on the device: lanes of the new and of the old bits, and the
            number of elements.
        blocks: ``(blocks, 3)`` int64 on the device: address, first position and count of each block
            of a fused write; ``None`` if the kernels are torch operations.
        placements: Table of the placements.
    """

    positions: Tensor
    old: Tensor
    new: Tensor
    runs: Table
    sums: Tensor
    blocks: Tensor | None
    placements: PlacementTable

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        kept = [self.positions, self.old, self.new, self.sums]
        return sum(one.nbytes for one in kept) + (0 if self.blocks is None else self.blocks.nbytes)


def effects(sums: Tensor) -> list[SlotEffect]:
    """Read the effects of each slot from :attr:`StagedChanges.sums`, or from a sum of them."""
    rows = sums.cpu().numpy().view(np.uint64).tolist()
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


def _row(one: LivePlacement, key: DigestKey, ndim: int) -> list[int]:
    filled = [*one.dims, *[(1, 1, 0)] * (ndim - len(one.dims))]
    address = one.storage.data_ptr()
    return [one.offset, one.at, one.slot, *key, address, *(n for dim in filled for n in dim)]
