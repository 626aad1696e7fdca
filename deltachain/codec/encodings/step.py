"""Encoding ``step``: changed elements as differences of bits, split into sign and magnitude."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from deltachain.codec.bucket_writer import BucketWriter
from deltachain.codec.container import Segment, TensorRow
from deltachain.codec.encodings.sparse import SparseEncoding, read_gaps
from deltachain.codec.tensor_reader import TensorReader
from deltachain.delta import TensorDelta
from deltachain.kernels import host
from deltachain.kernels.reference import Changes, StagedSteps, StepStreams, WindowPlace
from deltachain.types import Bits, TensorSpec


@dataclass(frozen=True, slots=True)
class StepEncoding(SparseEncoding):
    """Steps ``new - old``: the smallest encoding, but the reader needs the base bits.

    Streams: ``sign`` and ``exception``, one bit a step; ``magnitude``, one byte for each step with
    a magnitude other than 1; ``wide.k``, the whole step if its magnitude is 255 or more.
    """

    name: ClassVar[str] = "step"
    absolute: ClassVar[bool] = False
    has_exceptions: ClassVar[bool] = True
    checked: ClassVar[bool] = True
    stages: ClassVar[bool] = True

    @override
    def estimate(self, spec: TensorSpec, changes: Changes) -> int:
        nnz = int(changes.indices.size)
        if 4 * nnz < spec.numel:  # smaller than the tensor even if every step were wide
            return nnz
        steps = changes.new - changes.old
        magnitude = np.minimum(steps, -steps)
        exceptions = int(np.count_nonzero(magnitude != 1))
        wide = int(np.count_nonzero(magnitude >= 255)) if spec.itemsize > 1 else 0
        return nnz + nnz // 4 + exceptions + wide * spec.itemsize

    @override
    def value_streams(self, row: TensorRow, segments: tuple[Segment, ...]) -> Mapping[str, int]:
        nnz = sum(s.nnz for s in segments)
        exceptions, wide = sum(s.exceptions for s in segments), sum(s.wide for s in segments)
        lengths = {"sign": nnz, "exception": nnz, "magnitude": exceptions}
        return lengths | {f"wide.{k}": wide for k in range(row.itemsize)}

    @override
    def put_values(self, values: Bits, out: BucketWriter) -> tuple[int, int]:
        split = host.split_steps(values)
        out.put("sign", split.negative)
        out.put("exception", split.exception)
        out.put("magnitude", split.magnitude)
        out.put_planes("wide", split.wide)
        return split.magnitude.size, split.wide.size

    def streams_of(self, tensor: TensorReader) -> tuple[npt.NDArray[np.int64], StepStreams]:
        """Return the segments of a tensor, and their streams, for the kernels that decode them.

        Raises:
            DigestMismatchError: A frame differs from its digest in the directory.
            MalformedError: The padding bits of a stream are not zero.
        """
        sign, exception = tensor.packed("sign"), tensor.packed("exception")
        streams = StepStreams(
            read_gaps(tensor),
            *sign,
            *exception,
            magnitude=tensor.units("magnitude"),
            wide=tensor.planes("wide", tensor.spec.itemsize),
        )
        return tensor.table, streams

    @override
    def decode(self, tensor: TensorReader) -> TensorDelta:
        segments, streams = self.streams_of(tensor)
        try:
            indices, steps = host.decode_steps(segments, streams)
        except ValueError as exc:
            raise tensor.malformed(str(exc)) from exc
        return TensorDelta(spec=tensor.spec, indices=indices, values=steps)

    @override
    def stage(
        self, tensor: TensorReader, box: WindowPlace, weights: Bits, key: tuple[int, int]
    ) -> StagedSteps:
        segments, streams = self.streams_of(tensor)
        try:
            return host.stage_steps(segments, streams, box, weights, key)
        except ValueError as exc:
            raise tensor.malformed(str(exc)) from exc

    @override
    def read_values(self, tensor: TensorReader) -> Bits:
        return self.decode(tensor).values
