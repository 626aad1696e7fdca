"""Encoding ``dense``: all bits of a tensor, or of windows of it, in byte planes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from typing_extensions import override

from deltachain.codec.bucket_writer import BucketWriter
from deltachain.codec.container import SEGMENT, Segment, TensorRow
from deltachain.codec.encodings.base import EncodedTensor, Encoding
from deltachain.codec.tensor_reader import TensorReader
from deltachain.delta import ABSOLUTE, TensorDelta


@dataclass(frozen=True, slots=True)
class DenseEncoding(Encoding):
    """New bits of every element of the segments, in ``dense.k``."""

    name: ClassVar[str] = "dense"
    sparse: ClassVar[bool] = False

    @override
    def fits_row(self, row: TensorRow, numel: int) -> bool:
        return row.gap == 0

    @override
    def fits_segment(self, row: TensorRow, segment: Segment) -> bool:
        return segment.nnz == segment.length and not segment.gaps and not segment.exceptions

    @override
    def streams(self, row: TensorRow, segments: tuple[Segment, ...]) -> Mapping[str, int]:
        nnz = sum(s.nnz for s in segments)
        return {f"dense.{k}": nnz for k in range(row.itemsize)}

    @override
    def encode(self, delta: TensorDelta, out: BucketWriter) -> EncodedTensor:
        out.put_planes("dense", delta.values)
        segments = []
        for start, stop in _runs(delta):
            lengths = (min(SEGMENT, stop - at) for at in range(start, stop, SEGMENT))
            segments += [Segment(start + SEGMENT * i, n, n) for i, n in enumerate(lengths)]
        return EncodedTensor(segments=segments)

    @override
    def decode(self, tensor: TensorReader) -> TensorDelta:
        spec, values = tensor.spec, tensor.planes("dense", tensor.spec.itemsize)
        if values.size == spec.numel:
            return TensorDelta.dense(spec, values)
        first = tensor.segments[0].start if tensor.segments else 0
        last = tensor.segments[-1] if tensor.segments else None
        if tensor.is_part and last and last.start + last.length - first == values.size:
            return TensorDelta.run(spec, first, values)
        windows = [np.arange(s.start, s.start + s.length) for s in tensor.segments]
        indices = np.concatenate([np.empty(0, np.int64), *windows])
        return TensorDelta(spec=spec, indices=indices, values=values, absolute=ABSOLUTE)


def _runs(delta: TensorDelta) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each run of consecutive elements."""
    if delta.indices is None:
        yield 0, delta.spec.numel
    elif delta.nnz:
        cuts = np.flatnonzero(np.diff(delta.indices) != 1) + 1
        for run in np.split(delta.indices, cuts):
            yield int(run[0]), int(run[-1]) + 1
