"""From inflated streams of many tensors to changes that are staged for live weights.

The order of calls: :func:`.segments.pack` and :func:`upload` for each batch, :func:`decode`,
:func:`fold` if there are several versions, :func:`stage`; then :func:`write_`, and :func:`undo_` to
take it back. Weights on a CUDA device are served by Triton kernels if triton is installed, all
others by torch operations; results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from deltachain.kernels import batched
from deltachain.kernels.batched import after, fold, upload
from deltachain.kernels.segments import (
    ChangeBatch,
    PlacementTable,
    Plane,
    SegmentBatch,
    StagedChanges,
)
from deltachain.kernels.tile_batch import TileBatch

__all__ = [
    "after",
    "allocator",
    "decode",
    "decode_tiles",
    "fold",
    "stage",
    "undo_",
    "upload",
    "write_",
]


class StagingKernels(Protocol):
    """Kernels of one implementation: :mod:`.batched` in torch, :mod:`.fused` in Triton."""

    def decode(self, batch: SegmentBatch, buffer: Tensor) -> ChangeBatch:
        """See :func:`decode`."""

    def stage(
        self, changes: ChangeBatch, placements: PlacementTable, names: Sequence[str]
    ) -> StagedChanges:
        """See :func:`stage`."""

    def write_(self, staged: StagedChanges, bits: Tensor) -> None:
        """Write ``(n,)`` bits at the staged positions."""


def kernels_of(device: torch.device) -> StagingKernels:
    """Return the kernels for a device."""
    return _fused() if device.type == "cuda" else batched


@cache
def _fused() -> StagingKernels:
    """Return the kernels in Triton, or those in torch where triton cannot be imported."""
    try:
        return cast("StagingKernels", import_module("deltachain.kernels.fused"))
    except ImportError:
        return batched


def allocator(device: torch.device) -> Callable[[int], Plane]:
    """Return the function that :func:`.segments.pack` takes memory with, page-locked for CUDA."""
    return _page_locked if device.type == "cuda" else _plain


def _page_locked(nbytes: int) -> Plane:
    memory: Plane = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


def _plain(nbytes: int) -> Plane:
    return np.empty(nbytes, np.uint8)


def decode(batch: SegmentBatch, buffer: Tensor) -> ChangeBatch:
    """Decode all segments of a batch.

    Args:
        batch: The batch.
        buffer: Its buffer on a device, from :func:`upload`.

    Returns:
        The changes in the order of the table. Errors are not raised yet: :func:`stage` reads the
        verdict.
    """
    return kernels_of(buffer.device).decode(batch, buffer)


class TileKernels(Protocol):
    """Kernels of one implementation: :mod:`.tile_launch` in Triton, or :mod:`.tile_fallback`."""

    def decode_tiles(self, batch: TileBatch, buffer: Tensor, olds: Sequence[Tensor]) -> ChangeBatch:
        """See :func:`decode_tiles`."""


@cache
def _tiles(kind: str) -> TileKernels:
    """Return the kernels for a kind of device, such as ``cuda``."""
    try:
        name = "tile_launch" if kind == "cuda" else "tile_fallback"
        return cast("TileKernels", import_module(f"deltachain.kernels.{name}"))
    except ImportError:
        return _tiles("cpu")


def decode_tiles(batch: TileBatch, buffer: Tensor, olds: Sequence[Tensor]) -> ChangeBatch:
    """Decode all tiles of a batch: in Triton on a CUDA device, on the host for all others.

    Args:
        batch: The batch.
        buffer: Its buffer on a device, from :func:`upload`.
        olds: ``(n,)`` contiguous old bits of each tensor of the batch, on that device, from flat
            index ``grid.start`` to ``stop``.

    Returns:
        The changes; those of a segment in any order. Errors are not raised yet: :func:`stage` reads
        the verdict.
    """
    return _tiles(buffer.device.type).decode_tiles(batch, buffer, olds)


def stage(changes: ChangeBatch, placements: PlacementTable, names: Sequence[str]) -> StagedChanges:
    """Find the changes in the placements of this rank, and compute their new bits; write nothing.

    The device is waited for once, to read the verdict and the number of elements.

    Args:
        changes: Changes of tensors of one element width.
        placements: Placements of these tensors, in storages of that width.
        names: Names of the tensors, by number, for errors.

    Raises:
        MalformedError: A segment is malformed.
        BaseMismatchError: Tiles cannot be decoded with the old bits.
    """
    return kernels_of(changes.indices.device).stage(changes, placements, names)


def write_(staged: StagedChanges) -> None:
    """Write the new bits."""
    kernels_of(staged.new.device).write_(staged, staged.new)


def undo_(staged: StagedChanges) -> None:
    """Write the old bits back."""
    kernels_of(staged.old.device).write_(staged, staged.old)
