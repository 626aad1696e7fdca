"""Batches of segments for the batched kernels, and what the reference makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from deltachain.kernels import reference
from deltachain.kernels.reference import SplitSteps
from deltachain.kernels.segments import (
    Column,
    Reason,
    SegmentBatch,
    StreamLayout,
    TensorStreams,
    pack,
)
from deltachain.types import BITS_DTYPES, Bits, Indices


@dataclass(frozen=True)
class Given:
    """The changed elements of one tensor: ascending indices, and steps or new bits."""

    tensor: int
    numel: int
    indices: Indices
    values: Bits


@dataclass
class Streams:
    segments: list[tuple[int, ...]] = field(default_factory=list)
    gaps: list[Bits] = field(default_factory=list)
    negative: list[Any] = field(default_factory=list)
    exception: list[Any] = field(default_factory=list)
    magnitude: list[Any] = field(default_factory=list)
    values: list[Bits] = field(default_factory=list)


def streams_of(given: Given, layout: StreamLayout, length: int, bit: int) -> TensorStreams:
    made = Streams()
    for number in np.unique(given.indices // length).tolist():
        start = number * length
        mine = (given.indices >= start) & (given.indices < start + length)
        values = given.values[mine]
        offsets = given.indices[mine] - start
        gaps = reference.encode_gaps(offsets, layout.gap)
        split = reference.split_steps(values)
        counts = (0, 0) if layout.absolute else (split.magnitude.size, split.wide.size)
        size = min(length, given.numel - start)
        made.segments.append((start, size, values.size, gaps.size, *counts))
        made.gaps.append(gaps)
        made.negative.append(split.negative)
        made.exception.append(split.exception)
        made.magnitude.append(split.magnitude)
        made.values.append(values if layout.absolute else split.wide)
    bits = not layout.absolute
    none = np.empty(0, np.uint8)
    return TensorStreams(
        tensor=given.tensor,
        numel=given.numel,
        segments=np.array(made.segments, np.int64).reshape(-1, 6),
        planes=_planes(_joined(made.values, BITS_DTYPES[layout.width]), layout.width),
        gaps=_planes(_joined(made.gaps, BITS_DTYPES[layout.gap]), layout.gap),
        sign=_bits(made.negative, bit) if bits else none,
        exception=_bits(made.exception, bit) if bits else none,
        magnitude=_joined(made.magnitude, np.dtype(np.uint8)) if bits else none,
        bit=bit if bits else 0,
    )


def batch_of(
    given: Sequence[Given], layout: StreamLayout, length: int = 1 << 20, first_bit: int = 3
) -> SegmentBatch:
    return pack(
        layout,
        [streams_of(g, layout, length, (first_bit + i) % 8) for i, g in enumerate(given)],
    )


def decoded(batch: SegmentBatch) -> tuple[Indices, Bits, Any]:
    dtype = BITS_DTYPES[batch.layout.width]
    indices = np.zeros(batch.totals.nnz, np.int64)
    values = np.zeros(batch.totals.nnz, dtype)
    verdict = np.zeros(len(batch.table) - 1, np.int32)
    for number, (row, following) in enumerate(zip(batch.table, batch.table[1:], strict=False)):
        out = slice(row[Column.FIRST], following[Column.FIRST])
        offsets, why = _offsets(batch, row, following)
        found, other = _values(batch, row, following)
        verdict[number] = max(why, other)
        if not verdict[number]:
            indices[out] = offsets + row[Column.START]
            values[out] = found
    return indices, values, verdict


def _offsets(batch: SegmentBatch, row: Any, following: Any) -> tuple[Any, Reason]:
    nnz, gap = following[Column.FIRST] - row[Column.FIRST], batch.layout.gap
    entries = _from_planes(batch, range(gap), row, following, Column.GAP)
    offsets = reference.decode_gaps(entries)
    limit = np.iinfo(entries.dtype).max
    if offsets.size != nnz:
        return offsets, Reason.GAPS
    if entries[-1] == limit:
        return offsets, Reason.LAST_GAP
    return offsets, Reason.LENGTH if offsets[-1] >= row[Column.LENGTH] else Reason.NONE


def _values(batch: SegmentBatch, row: Any, following: Any) -> tuple[Any, Reason]:
    layout, gap = batch.layout, batch.layout.gap
    planes = range(gap + 3, gap + 3 + layout.width)
    if layout.absolute:
        return _from_planes(batch, planes, row, following, Column.FIRST), Reason.NONE
    streams = _streams(batch)
    nnz = following[Column.FIRST] - row[Column.FIRST]
    bits = slice(row[Column.BIT], row[Column.BIT] + nnz)
    negative, exception = (
        np.unpackbits(streams[gap + k], bitorder="little")[bits].astype(np.bool_) for k in (0, 1)
    )
    magnitude = streams[gap + 2][row[Column.EXCEPTION] : following[Column.EXCEPTION]]
    wide = _from_planes(batch, planes, row, following, Column.WIDE)
    if magnitude.size != exception.sum():
        return wide, Reason.EXCEPTIONS
    largest = 255 if layout.width > 1 else 127 + negative[exception].astype(np.int64)
    if np.any((magnitude < 2) | (magnitude > largest)):
        return wide, Reason.MAGNITUDE
    escaped = (magnitude == 255) & (layout.width > 1)
    if escaped.sum() != wide.size:
        return wide, Reason.WIDES
    again = reference.split_steps(wide)
    full = again.magnitude.size == wide.size and bool((again.magnitude == 255).all())
    if not full or not np.array_equal(again.negative, negative[exception][escaped]):
        return wide, Reason.WIDE_STEP
    return reference.join_steps(SplitSteps(negative, exception, magnitude, wide)), Reason.NONE


def _from_planes(
    batch: SegmentBatch, numbers: Sequence[int], row: Any, following: Any, column: Column
) -> Bits:
    streams = _streams(batch)
    mine = [streams[k][row[column] : following[column]] for k in numbers]
    stacked = np.ascontiguousarray(np.stack(mine, axis=1))
    return stacked.view(BITS_DTYPES[len(mine)]).reshape(-1)


def _joined(arrays: list[Any], dtype: np.dtype[Any]) -> Any:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype)


def _planes(values: Bits, width: int) -> list[Any]:
    if not width:
        return []
    split = values.view(np.uint8).reshape(-1, width)
    return [np.ascontiguousarray(split[:, k]) for k in range(width)]


def _bits(flags: list[Any], bit: int) -> Any:
    packed = _joined(flags, np.dtype(np.bool_))
    # Bits of another tensor come before: ones, so that reading them shows.
    return np.packbits(np.concatenate([np.ones(bit, np.bool_), packed]), bitorder="little")


def _streams(batch: SegmentBatch) -> list[Any]:
    """Gap planes, ``sign``, ``exception``, ``magnitude`` and value planes."""
    return [batch.buffer[a:b] for a, b in pairwise(batch.offsets)]
