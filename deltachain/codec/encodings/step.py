"""Encoding ``step``: changed elements as differences of bits, split into sign and magnitude."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from typing_extensions import override

from deltachain.codec.bucket_writer import BucketWriter
from deltachain.codec.directory import Segment, TensorRow
from deltachain.codec.encodings.sparse import SparseEncoding
from deltachain.codec.tensor_reader import TensorReader
from deltachain.kernels import host
from deltachain.kernels.reference import Changes, SplitSteps
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

    @override
    def read_values(self, tensor: TensorReader) -> Bits:
        split = SplitSteps(
            negative=tensor.units("sign").astype(np.bool_),
            exception=tensor.units("exception").astype(np.bool_),
            magnitude=tensor.units("magnitude"),
            wide=tensor.planes("wide", tensor.spec.itemsize),
        )
        if not _add_up(split, tensor.segments) or not _is_canonical(split):
            raise tensor.malformed("steps are not canonical")
        return host.join_steps(split)


def _add_up(split: SplitSteps, segments: tuple[Segment, ...]) -> bool:
    """Return whether the counts of exceptions and wide steps of each segment are right."""
    escaped = split.magnitude == 255
    at = short = 0
    for s in segments:
        exceptions = int(np.count_nonzero(split.exception[at : at + s.nnz]))
        wide = int(np.count_nonzero(escaped[short : short + s.exceptions]))
        if (exceptions, wide) != (s.exceptions, s.wide):
            return False
        at, short = at + s.nnz, short + s.exceptions
    return True


def _is_canonical(split: SplitSteps) -> bool:
    """Return whether steps are in canonical form."""
    escaped = split.magnitude == 255
    if bool(np.any(split.magnitude < 2)):
        return False
    if not split.wide.size and split.wide.itemsize > 1:
        return True
    negative = split.negative[split.exception]
    if split.wide.itemsize == 1:  # larger magnitudes belong to the other sign
        return not bool(np.any(split.magnitude > negative + np.uint8(127)))
    again = host.split_steps(split.wide)
    if again.magnitude.size != split.wide.size or bool(np.any(again.magnitude != 255)):
        return False
    return np.array_equal(again.negative, negative[escaped])
