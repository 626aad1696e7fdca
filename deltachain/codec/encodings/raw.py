"""Encoding ``raw``: indices and new bits as arrays for any safetensors reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from typing_extensions import override

from deltachain.codec.bucket_writer import BucketWriter
from deltachain.codec.container import TensorRow
from deltachain.codec.encodings.base import EncodedTensor, Encoding
from deltachain.codec.tensor_reader import TensorReader
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
        return TensorDelta.dense(spec, tensor.array(spec.name).view(spec.bits_dtype))


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
        indices = tensor.array(f"{spec.name}.indices").view(_little_endian(spec))
        values = tensor.array(f"{spec.name}.values").view(spec.bits_dtype)
        wide = indices.astype(np.int64)
        return TensorDelta(spec=spec, indices=wide, values=values, absolute=ABSOLUTE)


def _index_dtype(spec: TensorSpec) -> str:
    return "I32" if spec.numel < 1 << 31 else "I64"


def _little_endian(spec: TensorSpec) -> np.dtype[np.signedinteger]:
    return np.dtype("<i4" if _index_dtype(spec) == "I32" else "<i8")
