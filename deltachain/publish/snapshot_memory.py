"""Memory of a snapshot: where it is, and the flat slabs that its bits are in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from deltachain.kernels.device import INT_DTYPES, pin_
from deltachain.kernels.device_diff import ALIGNMENT, CopyStream

SnapshotPlace: TypeAlias = Literal["host", "device"]
"""Where a snapshot of weights on a device is: in pinned host memory, or on that device."""

RESERVE_SHARE: Final = 2
"""Part of a device's memory that a snapshot leaves free, as a divisor: activations need it."""

OPTIMIZER_COPIES: Final = 6
"""Size of what an optimizer may allocate in its first step, in snapshots: an fp32 master and two
fp32 moments of bf16 weights."""

SLAB_NBYTES: Final = 1 << 30
"""Size of a slab, in bytes, unless less is left or a single tensor is larger."""

READ_NUMEL: Final = 1 << 23
"""Elements copied at a time from a snapshot on a device."""


class Memory(NamedTuple):
    """Memory of a device, in bytes: free, and in all."""

    free: int
    total: int


def reserve_nbytes(total: int, nbytes: int) -> int:
    """Return the bytes of a device that a snapshot of ``nbytes`` must leave free."""
    return total // RESERVE_SHARE + OPTIMIZER_COPIES * nbytes


def choose_place(asked: SnapshotPlace | None, memory: Memory, nbytes: int) -> SnapshotPlace:
    """Return where a snapshot of ``nbytes`` goes: as asked, else the device if it fits there."""
    if asked is not None:
        return asked
    fits = memory.free - nbytes >= reserve_nbytes(memory.total, nbytes)
    return "device" if fits else "host"


def memory_of(where: torch.device) -> Memory:
    """Return the memory of a device; all of it is taken where there is nothing to ask."""
    return Memory(*torch.cuda.mem_get_info(where)) if where.type == "cuda" else Memory(0, 0)


class Kept(NamedTuple):
    """Bits of one tensor in a snapshot.

    Attributes:
        slab: Flat bits of one or more tensors.
        at: Position of the tensor's first element.
        numel: Number of its elements.
        resident: Whether it is compared where it is, on the device of the weights.
    """

    slab: Tensor
    at: int
    numel: int
    resident: bool

    @property
    def bits(self) -> Tensor:
        """Flat bits of the tensor; shares memory."""
        return self.slab[self.at : self.at + self.numel]


@dataclass(slots=True)
class Slabs:
    """Allocator of slabs: tensors of one width lie side by side in the order they are taken.

    Attributes:
        left: Elements still to be taken, by element size in bytes; the last slab is that small.
    """

    left: dict[int, int]
    _open: dict[tuple[torch.device, int], tuple[Tensor, int]] = field(default_factory=dict)

    def take(
        self, numel: int, width: int, where: torch.device, *, resident: bool, pinned: bool
    ) -> Kept:
        """Return room for a tensor, with any content.

        Args:
            numel: Number of elements.
            width: Size of an element, in bytes.
            where: Device of the slab.
            resident: Whether ``where`` is the device of the weights.
            pinned: Whether to pin the slab, on the host.
        """
        key, size = (where, width), aligned(numel, width)
        slab, used = self._open.get(key, (None, 0))
        if slab is None or used + size > slab.numel():
            expected = min(SLAB_NBYTES // width, self.left.get(width, 0))
            slab, used = torch.empty(max(size, expected), dtype=INT_DTYPES[width], device=where), 0
            if pinned:
                pin_(slab)
        self.left[width] = max(0, self.left.get(width, 0) - size)
        self._open[key] = slab, used + size
        return Kept(slab, used, numel, resident)


def aligned(numel: int, width: int) -> int:
    """Return a number of elements rounded up to the alignment of tensors in a slab."""
    unit = ALIGNMENT // width
    return -(-numel // unit) * unit


def wait_for_writes(slab: Tensor) -> None:
    """Wait for writes to a slab by this thread, so that other streams and threads may read it."""
    streams = CopyStream(slab.device)
    streams.wait(streams.mark())


def read(bits: Tensor) -> Tensor:
    """Copy ``(n,)`` bits from a device to the host through a small pinned buffer.

    The stream of the caller is neither used nor waited for, since a step may be under way there:
    call :func:`wait_for_writes` after writes.
    """
    streams = CopyStream(bits.device)
    whole = torch.empty(bits.numel(), dtype=bits.dtype)
    buffer = streams.room(min(bits.numel(), READ_NUMEL), bits.dtype)
    for at in range(0, bits.numel(), READ_NUMEL):
        chunk = bits[at : at + READ_NUMEL]
        with streams.copying():
            buffer[: chunk.numel()].copy_(chunk, non_blocking=True)
            copied = streams.mark_copies()
        streams.wait(copied)
        whole[at : at + chunk.numel()] = buffer[: chunk.numel()]
    return whole
