"""Diff of a batch in torch operations, where there are no fused kernels; waits once a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deltachain.kernels import device


class Arena(NamedTuple):
    """Room on a device for the changes of batches, filled from the front.

    Attributes:
        offsets: Offset of each change in its block, int16 of shape ``(capacity,)``.
        new: New bits, shape ``(capacity,)``.
        old: Old bits, shape ``(capacity,)``; ``new`` itself if they are not wanted.
    """

    offsets: Tensor
    new: Tensor
    old: Tensor

    @classmethod
    def empty(cls, capacity: int, dtype: torch.dtype, where: torch.device, *, old: bool) -> Arena:
        """Return room for ``capacity`` changes of bits of ``dtype``."""
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
        arena: The arena.
    """

    counts: Tensor
    header: Tensor
    arena: Arena


def diff_batch_(
    now: Sequence[Tensor], then: Sequence[Tensor], numels: Tensor, *, master: bool, resident: bool
) -> Placed:
    """Find the changes of a batch, in an arena of its own.

    Args:
        now: Flat bits of the weights, one tensor a span; fp32 ones as int32.
        then: Flat bits of the snapshot, one tensor a span.
        numels: Number of elements of each block, int64 of shape ``(blocks,)``, on the device.
        master: Whether the weights are fp32 masters of a bf16 snapshot.
        resident: Whether to update ``then``.
    """
    current, kept = _joined(now), _joined(then)
    if master:
        current = device.cast_bf16(current)
    at = (kept != current).nonzero().view(-1)
    ends = numels.cumsum(0)
    counts = torch.searchsorted(at, ends).diff(prepend=ends.new_zeros(1))
    block = torch.searchsorted(ends, at, right=True)
    new, old = current[at], kept[at]
    arena = Arena((at - (ends - numels)[block]).to(torch.int16), new, old if resident else new)
    nnz = at.numel()
    if resident:
        for bits, part in zip(then, current.split([bits.numel() for bits in then]), strict=True):
            bits.copy_(part)
    header = torch.tensor([0, nnz, nnz], device=at.device)
    return Placed(counts.to(torch.int16), header, arena)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
