"""Encoding ``plain``: a whole tensor as an array for any safetensors reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from deltachain.codec.bucket_writer import BucketWriter
from deltachain.codec.directory import TensorRow
from deltachain.codec.encodings.base import EncodedTensor, Encoding
from deltachain.codec.old_bits import OldBits
from deltachain.codec.tensor_reader import TensorReader
from deltachain.delta import TensorDelta
from deltachain.errors import ConfigError


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
    def encode(
        self, delta: TensorDelta, out: BucketWriter, old: OldBits | None = None
    ) -> EncodedTensor:
        spec = delta.spec
        if delta.indices is not None:
            raise ConfigError(f"{spec.name}: windows are not written raw")
        out.put_array(spec.name, spec.dtype, spec.shape, delta.values)
        return EncodedTensor()

    @override
    def decode(self, tensor: TensorReader) -> TensorDelta:
        spec = tensor.spec
        return TensorDelta.dense(spec, tensor.array(spec.name).view(spec.bits_dtype))
