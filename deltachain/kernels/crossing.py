"""Diff of weights on a device against a snapshot on the host.

The snapshot is copied to the device in chunks, each while the previous one is compared; only
changes are copied back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deltachain.kernels import device, host
from deltachain.kernels.reference import Changes

CHUNK: Final = 1 << 25
"""Elements of a chunk: 64 MiB of bf16; two chunks are on the device at once."""


def diff_across_(snapshot: Tensor, current: Tensor, dtype: torch.dtype) -> Changes:
    """Find changes of weights on any device against a host snapshot, and update the snapshot.

    Args:
        snapshot: Flat bits on the host, pinned if the weights are on CUDA.
        current: Flat weights, in any dtype that casts to ``dtype``.
        dtype: Dtype of the snapshot's bits.
    """
    found = []
    for at, staged in _staged(snapshot, current.device):
        bits = device.bits_of(current[at : at + staged.numel()].to(dtype))
        compact = [part.cpu().numpy() for part in device.diff(staged, bits)]
        indices, old, new = compact[0], *(a.view(f"<u{a.itemsize}") for a in compact[1:])
        found.append(Changes(indices + at, old, new))
    changes = Changes(*(np.concatenate(column) for column in zip(*found, strict=True)))
    kept = snapshot.numpy()
    host.scatter_(kept.view(f"<u{kept.itemsize}"), changes.indices, changes.new)
    return changes


def _staged(snapshot: Tensor, where: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Yield chunks of the snapshot on the device; on CUDA the next one is copied meanwhile."""
    starts = range(0, max(snapshot.numel(), 1), CHUNK)
    if where.type != "cuda":
        yield from ((at, snapshot[at : at + CHUNK].to(where)) for at in starts)
        return
    copies, compute = torch.cuda.Stream(where), torch.cuda.current_stream(where)

    def send(at: int) -> Tensor:
        with torch.cuda.stream(copies):
            return snapshot[at : at + CHUNK].to(where, non_blocking=True)

    following = send(0)
    for at in starts:
        chunk = following
        compute.wait_stream(copies)
        chunk.record_stream(compute)
        if at + CHUNK < snapshot.numel():
            following = send(at + CHUNK)
        yield at, chunk
