"""Encoding ``overwrite``: new bits of changed elements, in byte planes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from deltachain.codec.bucket_writer import BucketWriter
from deltachain.codec.directory import Segment, TensorRow
from deltachain.codec.encodings.sparse import SparseEncoding
from deltachain.codec.tensor_reader import TensorReader
from deltachain.types import Bits


@dataclass(frozen=True, slots=True)
class OverwriteEncoding(SparseEncoding):
    """New bits in ``value.k``: larger than steps, but the reader needs no base."""

    name: ClassVar[str] = "overwrite"

    @override
    def value_streams(self, row: TensorRow, segments: tuple[Segment, ...]) -> Mapping[str, int]:
        nnz = sum(s.nnz for s in segments)
        return {f"value.{k}": nnz for k in range(row.itemsize)}

    @override
    def put_values(self, values: Bits, out: BucketWriter) -> tuple[int, int]:
        out.put_planes("value", values)
        return 0, 0

    @override
    def read_values(self, tensor: TensorReader) -> Bits:
        return tensor.planes("value", tensor.spec.itemsize)
