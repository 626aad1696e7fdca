"""Decode tiles of many tensors on the host, where :mod:`.tile_launch` cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltachain.kernels import host
from deltachain.kernels.device import INT_DTYPES
from deltachain.kernels.segments import ChangeBatch, Column
from deltachain.kernels.tile_batch import MESSAGES, TileBatch, TileReason
from deltachain.kernels.tiles import TileStreams
from deltachain.types import BITS_DTYPES

_REASONS = {message: reason for reason, message in MESSAGES.items()}


def decode_tiles(batch: TileBatch, buffer: Tensor, olds: Sequence[Tensor]) -> ChangeBatch:
    """Decode all tiles of a batch; see :func:`.tile_launch.decode_tiles`.

    Old bits on a device are copied to the host, one tensor at a time.
    """
    nnz, at = int(batch.table[-1, Column.FIRST]), 0
    indices = np.zeros(nnz, np.int64)
    values = np.zeros(nnz, BITS_DTYPES[batch.width])
    kept, verdict = np.zeros(nnz, np.bool_), np.zeros(len(batch.complete), np.int32)
    segment = 0
    for one, old in zip(batch.tensors, olds, strict=True):
        bits: Any = old.cpu().numpy().view(values.dtype)
        streams = TileStreams(one.data, bits, one.table, one.grid, one.wanted)
        try:
            found, steps = host.decode_tiles(one.segments, streams)
        except ValueError as exc:
            verdict[segment] = _REASONS.get(str(exc), TileReason.ENDS)
        else:
            there = slice(at, at + found.size)
            indices[there], values[there], kept[there] = found, steps, True
        at += int(one.segments[:, 2].sum())
        segment += len(one.segments)
    signed = torch.from_numpy(values.view(f"i{batch.width}" if batch.width > 1 else "u1"))
    return ChangeBatch(
        indices=torch.from_numpy(indices).to(buffer.device),
        values=signed.to(buffer.device, INT_DTYPES[batch.width]),
        absolute=False,
        kept=torch.from_numpy(kept).to(buffer.device),
        spans=batch.spans(),
        verdicts=((batch, torch.from_numpy(verdict).to(buffer.device)),),
    )
