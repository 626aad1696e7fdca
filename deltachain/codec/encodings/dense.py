"""Encodings of new bits without gaps: ``dense`` in byte planes, ``raw`` and ``plain`` as arrays."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from typing_extensions import override

from deltachain.codec.container import SEGMENT, Segment, TensorRow
from deltachain.codec.encodings.base import EncodedTensor, Encoding
from deltachain.codec.frames import BucketWriter, TensorReader
from deltachain.delta import ABSOLUTE, TensorDelta
from deltachain.errors import ConfigError
from deltachain.types import TensorSpec


@dataclass(frozen=True, slots=True)
class PlainEncoding(Encoding):
    """All bits of a tensor as one array with the tensor's name."""

    name: ClassVar[str] = "plain"
    sparse: ClassVar[bool] = False
    own_arrays: ClassVar[bool] = True

    @override
    def fits_row(self, row: TensorRow, numel: int) -> bool:
        return row.nnz == numel

    @override
    def arrays(self, row: TensorRow) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {row.name: (row.dtype, row.shape)}

    @override
    def encode(self, delta: TensorDelta, out: BucketWriter) -> EncodedTensor:
        spec = delta.spec
        if delta.indices is not None:
            raise ConfigError(f"{spec.name}: windows are not written raw")
        out.put_array(spec.name, spec.dtype, spec.shape, delta.values)
        return EncodedTensor()

    @override
    def decode(self, tensor: TensorReader) -> TensorDelta:
        spec = tensor.spec
        low, high = tensor.near or (0, spec.numel)
        data = tensor.array(spec.name, low * spec.itemsize, high * spec.itemsize)
        return TensorDelta.run(spec, low, data.view(spec.bits_dtype))


@dataclass(frozen=True, slots=True)
class RawEncoding(Encoding):
    """Changed elements as two arrays of the tensor, ``NAME.indices`` and ``NAME.values``."""

    name: ClassVar[str] = "raw"
    sparse: ClassVar[bool] = True
    own_arrays: ClassVar[bool] = True

    @override
    def fits_row(self, row: TensorRow, numel: int) -> bool:
        return row.nnz <= numel

    @override
    def arrays(self, row: TensorRow) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {
            f"{row.name}.indices": (_index_dtype(row.spec), (row.nnz,)),
            f"{row.name}.values": (row.dtype, (row.nnz,)),
        }

    @override
    def encode(self, delta: TensorDelta, out: BucketWriter) -> EncodedTensor:
        spec = delta.spec
        if delta.indices is None or delta.absolute.ndim or not delta.absolute:
            raise ConfigError(f"{spec.name}: raw deltas carry absolute bits, not steps")
        indices = delta.indices.astype(_little_endian(spec))
        out.put_array(f"{spec.name}.indices", _index_dtype(spec), indices.shape, indices)
        out.put_array(f"{spec.name}.values", spec.dtype, delta.values.shape, delta.values)
        return EncodedTensor()

    @override
    def decode(self, tensor: TensorReader) -> TensorDelta:
        spec = tensor.spec
        name, kind, first, last = f"{spec.name}.indices", _little_endian(spec), 0, tensor.row.nnz
        if tensor.near is not None:

            def index(number: int) -> int:
                at = number * kind.itemsize
                return int(tensor.array(name, at, at + kind.itemsize).view(kind)[0])

            if last and not 0 <= index(0) <= index(last - 1) < spec.numel:
                raise tensor.malformed("has indices beyond the tensor, or not in order")
            first, last = (bisect_left(range(last), end, key=index) for end in tensor.near)
        indices = tensor.array(name, first * kind.itemsize, last * kind.itemsize).view(kind)
        ends = (at * spec.itemsize for at in (first, last))
        values = tensor.array(f"{spec.name}.values", *ends).view(spec.bits_dtype)
        wide = indices.astype(np.int64)
        return TensorDelta(spec=spec, indices=wide, values=values, absolute=ABSOLUTE)


def _index_dtype(spec: TensorSpec) -> str:
    return "I32" if spec.numel < 1 << 31 else "I64"


def _little_endian(spec: TensorSpec) -> np.dtype[np.signedinteger]:
    return np.dtype("<i4" if _index_dtype(spec) == "I32" else "<i8")


@dataclass(frozen=True, slots=True)
class DenseEncoding(Encoding):
    """New bits of every element of the segments, in ``dense.k``."""

    name: ClassVar[str] = "dense"
    sparse: ClassVar[bool] = False
    columns: ClassVar[bool] = True

    @override
    def fits_row(self, row: TensorRow, numel: int) -> bool:
        return row.gap == 0

    @override
    def fits_segment(self, row: TensorRow, segment: Segment) -> bool:
        whole = segment.nnz == segment.length
        return whole & (segment.gaps == 0) & (segment.exceptions == 0)

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
    if delta.indices is None:
        yield delta.start, delta.start + delta.nnz
    elif delta.nnz:
        cuts = np.flatnonzero(np.diff(delta.indices) != 1) + 1
        for run in np.split(delta.indices, cuts):
            yield int(run[0]), int(run[-1]) + 1
